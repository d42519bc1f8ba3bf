"""What is counted of a kernel's machine instructions: a listing written by hand."""

from minimha.kernels.cuda import sass

# The loop from .L_x_1 has a copy that is skipped after the last tile, a part for partial tiles, an
# inner loop, and a rescaling; the loop from .L_x_5 has fewer products, and an exit that is none.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                /* 0x00000a0000017a02 */
.L_x_1:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0028*/                   SEL R5, R13, R14, !P2 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R5+0x80], desc[UR4][R8.64], !P3 ;
.L_x_2:
        /*0040*/              @!P1 BRA `(.L_x_3) ;
        /*0050*/                   FSEL R4, R4, -INF , !P0 ;
        /*0060*/                   STL [R1], R4 ;
.L_x_3:
        /*0070*/                   LDSM.16.M88.4 R128, [R180+0x800] ;
        /*0080*/                   HMMA.16816.F32.BF16 R96, R128.reuse, R156, RZ ;
        /*0090*/               @P2 BRA `(.L_x_3) ;
        /*00a0*/                   BRA.DIV UR8, `(.L_x_6) ;
        /*00b0*/              @!P3 BRA `(.L_x_4) ;
        /*00c0*/                   FMUL R96, R96, R3 ;
.L_x_4:
        /*00d0*/                   LDL.LU R7, [R1] ;
        /*00e0*/              @!PT HMMA.16816.F32.BF16 R92, R128, R158, R92 ;
        /*00f0*/               @P4 BRA `(.L_x_1) ;
.L_x_5:
        /*0100*/                   HMMA.16816.F32.BF16 R96, R128, R156, RZ ;
        /*0110*/               @P4 BRA `(.L_x_5) ;
.L_x_6:
        /*0120*/                   EXIT ;
        /*0130*/                   BRA `(.L_x_6) ;
"""


def test_a_whole_tile_is_everything_but_what_masks():
    names = sass.whole_tile(sass.parse(LISTING))
    assert names == [
        "BAR", "BRA", "SEL", "LDGSTS", "BRA", "LDSM", "HMMA", "BRA", "BRA", "BRA", "FMUL", "LDL",
        "HMMA", "BRA",
    ]  # fmt: skip
    assert sass.per_product(names) == 7


def test_without_tensor_cores_multiply_adds_make_the_tile():
    names = sass.whole_tile(sass.parse(LISTING.replace("HMMA", "FFMA")))
    assert names[5:9] == ["FSEL", "STL", "LDSM", "FFMA"]  # what masks counts, too
    assert names[13] == "LDL"
    assert sass.per_product(names) is None
    assert sass.whole_tile(sass.parse(LISTING.replace("HMMA", "MOV"))) == []
    assert sass.whole_tile([]) == []


def test_a_wait_beside_the_loop_is_no_part_of_it():
    waiting = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   HGMMA.64x96x16.F32 R24, gdesc[UR4], R24 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   HGMMA.64x96x16.F32 R24, gdesc[UR4], R24 ;
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9 ;
        /*0080*/              @!P0 BRA `(.L_x_3) ;
        /*0090*/                   BRA `(.L_x_2) ;
"""
    assert sass.whole_tile(sass.parse(waiting)) == ["SYNCS", "BRA", "HGMMA", "BRA"]
