"""Models larger than the memory that a process may have: weights stay in their files."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from models import plain

from minimha.models.checkpoints import from_tensors

resource = pytest.importorskip("resource", reason="this system limits no memory")

IDS = [3, 1, 4, 1, 5]
LARGE = plain.LLAMA | {
    "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
ROOM = 48 << 20  # bytes that the child may take after imports
# Prints the logits of a prompt, and of its last token alone, in a process that may take little.
CHILD = f"""
import resource, sys
import numpy as np
import minimha.models
from minimha.kernels import auto
from minimha.models.checkpoints import llama, safetensors
np.ones((512, 512), np.float32) @ np.ones((512, 64), np.float32)  # BLAS takes memory once
if {{uses_kernel}}:
    from minimha.kernels.cpu import weights
    weights.compile("bfloat16")
    weights.compile("float32")
    weights.product(np.ones((1, 4096), np.float32), np.ones((4096, 64), np.float32, order="F"))
    import minimha.kernels.cpu.backend
else:
    auto._broken = True  # importing numba takes memory, too
sizes = dict(line.split(":") for line in open("/proc/self/status"))
used = 1024 * int(sizes["VmData"].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (used + {ROOM},) * 2)
model = minimha.models.load(sys.argv[1])
cache = model.new_cache({len(IDS) + 1})
rows = [model.logits({IDS}, cache=cache), model.logits([9], cache=cache)]
np.save(sys.argv[2], np.concatenate(rows))
"""


def tensors(rng):
    E, F, V = LARGE["hidden_size"], LARGE["intermediate_size"], LARGE["vocab_size"]
    made = {
        "lm_head.weight": (V, E),
        "model.embed_tokens.weight": (V, E),
        "model.norm.weight": (E,),
    }
    for n in range(LARGE["num_hidden_layers"]):
        at = f"model.layers.{n}"
        made |= {f"{at}.{name}_layernorm.weight": (E,) for name in ("input", "post_attention")}
        made |= {f"{at}.self_attn.{letter}_proj.weight": (E, E) for letter in "qkvo"}
        for name, shape in (("gate", (F, E)), ("up", (F, E)), ("down", (E, F))):
            made[f"{at}.mlp.{name}_proj.weight"] = shape
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in made.items()}
    return {
        name: (0.03 * x).astype(ml_dtypes.bfloat16) if x.ndim == 2 else 1 + x / 9
        for name, x in drawn.items()
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the child reads /proc")
@pytest.mark.parametrize("uses_kernel", [False, True])
def test_a_model_runs_in_less_memory_than_its_weights_take(tmp_path, uses_kernel):
    held = tensors(np.random.default_rng(0))
    total = sum(x.nbytes for x in held.values())
    assert total > ROOM
    plain.write(tmp_path, LARGE, held)
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(uses_kernel=uses_kernel), tmp_path, tmp_path / "y.npy"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wide = {name: x.astype(np.float32) for name, x in held.items()}
    expected = from_tensors(LARGE, wide).logits([*IDS, 9])
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-4, atol=1e-4)
