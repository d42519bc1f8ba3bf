"""Threads that wait for others: mbarriers, ``setmaxnreg`` and barriers, in kernels of a few lines.

A warp copies, or writes, words that another one reads, three in turn to the same place. There are
32 arrivals at ``full``, from every thread that wrote, and one at ``empty``.
"""

import numpy as np
import pytest

from emulator import PTXError
from emulator.test_emulator import execute

FULL, EMPTY, ROUNDS = "%r4", "%r4+8", 3
RIGHT = 300 + 3 * np.arange(32)
START = """
    mov.u64 %d5, dynamic; cvt.u32.u64 %r4, %d5;
    shr.u32 %r5, %r0, 5; and.b32 %r6, %r0, 31; shl.b32 %r7, %r6, 2; add.u32 %r7, %r7, %r4;
    mov.u32 %r9, 0; setp.ne.u32 %p0, %r6, 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra STARTED;
    mbarrier.init.shared::cta.b64 [%r4], 32; mbarrier.init.shared::cta.b64 [%r4+8], 1;
    STARTED: bar.sync 0; setp.ne.u32 %p1, %r5, 0; @%p1 bra CONSUMER;
"""
WRITE = "add.u32 %r8, %r0, #00; st.shared.u32 [%r7+64], %r8;"
COPY = "cp.async.ca.shared.global [%r7+64], [%d3], 4;"
ARRIVE = f"mbarrier.arrive.shared::cta.b64 %d6, [{FULL}];"
ARRIVE_WITH_COPIES = f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{FULL}];"
RELEASE = f"bar.warp.sync 0xffffffff; @%p0 bra KEPT#; mbarrier.arrive.b64 %d6, [{EMPTY}]; KEPT#:"
LANDED = "cp.async.wait_all;"
LOOP = "@!%p2 bra "


def wait(name, at, parity):
    return f"{name}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [{at}], {parity}; {LOOP}{name};"


def read(order, *, fill=WRITE, arrive=ARRIVE, change=lambda text: text):
    """The sums of what the threads of the second warp read."""
    lines = [START]
    for n in range(ROUNDS):
        lines += [wait(f"EMPTY{n}", EMPTY, n + 1 & 1), (fill + arrive).replace("#", str(n))]
    lines.append(LANDED + "bra DONE; CONSUMER:")
    for n in range(ROUNDS):
        lines += [wait(f"FULL{n}", FULL, n & 1), "ld.shared.u32 %r8, [%r7+64];"]
        lines += ["add.u32 %r9, %r9, %r8;", RELEASE.replace("#", str(n))]
    body = change("\n".join([*lines, "DONE: st.global.u32 [%d4], %r9;"]))
    given = np.arange(100, 164, dtype=np.uint32)
    return execute(body, given, threads=64, shared=256, order=order)[32:]


def without(text, number=0):
    """A change that leaves out one occurrence of ``text``."""

    def change(body):
        parts = body.split(text)
        return text.join(parts[: number + 1]) + text.join(parts[number + 1 :])

    return change


@pytest.mark.parametrize("order", [None, 0, 1, 2])
@pytest.mark.parametrize(("fill", "arrive"), [(WRITE, ARRIVE), (COPY, ARRIVE_WITH_COPIES)])
def test_what_one_warp_writes_another_one_reads(fill, arrive, order):
    # The lane's number plus 0, 100 and 200, or three times 100 more than it.
    np.testing.assert_array_equal(read(order, fill=fill, arrive=arrive), RIGHT)


@pytest.mark.parametrize("order", [None, 0, 1])
@pytest.mark.parametrize(
    ("missing", "number", "sentence"),
    [
        (ARRIVE, 1, r"try_wait.*waits for ever at the mbarrier at 0x0.*32 of 32 have not arrived"),
        (ARRIVE, 2, r"try_wait.*waits for ever at the mbarrier at 0x0.*32 of 32 have not arrived"),
        (RELEASE.replace("#", "0"), 0, r"try_wait.*at the mbarrier at 0x8.*1 of 1 have not"),
        ("mbarrier.init.shared::cta.b64 [%r4+8], 1;", 0, "never written"),
    ],
)
def test_who_waits_for_ever_says_for_what(missing, number, sentence, order):
    with pytest.raises(PTXError, match=sentence):
        read(order, change=without(missing, number))


@pytest.mark.parametrize("order", [None, 0])
def test_more_arrivals_than_come_are_waited_for(order):
    with pytest.raises(PTXError, match="1 of 33 have not arrived"):
        read(order, change=lambda body: body.replace("[%r4], 32", "[%r4], 33"))


@pytest.mark.parametrize(
    "change",
    [
        without(LOOP + "FULL0;"),
        without(wait("FULL1", FULL, 1)),
        without(wait("EMPTY1", EMPTY, 0)),
        without("bar.sync 0;"),
        lambda body: body.replace(wait("FULL0", FULL, 0), wait("FULL0", FULL, 1)),
        lambda body: body.replace(wait("EMPTY1", EMPTY, 0), wait("EMPTY1", EMPTY, 1)),
    ],
    ids=["no loop", "not full", "not empty", "no init", "parity full", "parity empty"],
)
def test_reading_or_writing_too_early_is_noticed_in_some_order(change):
    def is_noticed(order):
        try:
            return (read(order, change=change) != RIGHT).any()
        except PTXError:
            return True

    assert any(is_noticed(order) for order in range(4))


@pytest.mark.parametrize("order", range(3))
def test_what_is_written_after_the_arrival_is_a_race(order):
    with pytest.raises(PTXError, match=r"unsynchronised|never written"):
        read(order, fill=ARRIVE, arrive=WRITE)


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize("arrive", [ARRIVE, ARRIVE_WITH_COPIES + COPY])
def test_only_copies_that_arrive_themselves_have_landed(arrive, order):
    with pytest.raises(PTXError, match=r"cp\.async"):
        read(order, fill=COPY, arrive=arrive, change=without(LANDED))


@pytest.mark.parametrize("order", [None, 0, 1])
def test_a_thread_that_exits_while_its_copies_are_in_flight_is_noticed(order):
    with pytest.raises(PTXError, match=r"thread \d+ exits before its cp\.async were waited for"):
        read(order, fill=COPY, arrive=ARRIVE_WITH_COPIES, change=without(LANDED))


@pytest.mark.parametrize("order", [None, 0, 1])
def test_threads_may_wait_at_different_mbarriers_in_one_instruction(order):
    body = f"""
        mov.u64 %d5, dynamic; cvt.u32.u64 %r4, %d5; setp.ne.u32 %p1, %r0, 0; @%p1 bra STARTED;
        mbarrier.init.shared::cta.b64 [%r4], 32; mbarrier.init.shared::cta.b64 [%r4+8], 32;
        STARTED: bar.sync 0; shr.u32 %r5, %r0, 5; shl.b32 %r6, %r5, 3; xor.b32 %r7, %r6, 8;
        add.u32 %r6, %r6, %r4; add.u32 %r7, %r7, %r4;
        shl.b32 %r8, %r0, 2; add.u32 %r8, %r8, %r4; st.shared.u32 [%r8+64], %r0;
        mbarrier.arrive.shared::cta.b64 %d6, [%r7];
        {wait("MINE", "%r6", 0)} xor.b32 %r9, %r0, 32; shl.b32 %r9, %r9, 2;
        add.u32 %r9, %r9, %r4; ld.shared.u32 %r9, [%r9+64]; st.global.u32 [%d4], %r9;
    """
    of_other_warp = execute(body, np.zeros(64, np.uint32), threads=64, shared=512, order=order)
    np.testing.assert_array_equal(of_other_warp, np.arange(64) ^ 32)


def roles(first, others, order, threads=384):
    """The first four warps execute the one, the others the other."""
    body = f"""setp.ge.u32 %p1, %r0, 128; @%p1 bra OTHERS; {first} bra DONE;
    OTHERS: {others} DONE: st.global.u32 [%d4], %r0;"""
    return execute(body, np.zeros(threads, np.uint32), threads=threads, order=order)


def registers(direction, count):
    return f"setmaxnreg.{direction}.sync.aligned.u32 {count};"


@pytest.mark.parametrize("order", [None, 0, 1])
def test_registers_that_were_given_back_can_be_taken(order):
    roles(registers("dec", 40), registers("inc", 232), order)  # each has 168 at first


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize(
    ("first", "others", "sentence"),
    [
        (registers("dec", 40), registers("inc", 240), "waits for ever for registers"),
        ("", registers("inc", 176), "waits for ever for registers: its block has 0"),
        (registers("dec", 176), "", "has fewer"),
        (registers("dec", 40), registers("inc", 160), "has more"),
    ],
)
def test_registers_that_nobody_gave_back_cannot_be_taken(first, others, sentence, order):
    with pytest.raises(PTXError, match=sentence):
        roles(first, others, order)


@pytest.mark.parametrize("order", [None, 0, 1])
def test_a_barrier_of_some_threads_waits_for_these_alone(order):
    roles("bar.sync 1, 128;", "bar.sync 2, 256;", order)


@pytest.mark.parametrize("order", [None, 0])
def test_a_barrier_for_more_threads_than_come_is_waited_at_for_ever(order):
    with pytest.raises(PTXError, match=r"bar\.sync 1, 256: .*waits for ever at a barrier for 256"):
        roles("bar.sync 1, 256;", "bar.sync 2, 256;", order)
