"""Tabulate how attention functions of different libraries use their arguments and results."""

from typing import NamedTuple


class Conventions(NamedTuple):
    """The conventions of one attention function, in words for a table.

    ``causal="after the past"`` means that the last query is at the position of the last key if
    there is a past (earlier keys), and that query 0 is at key 0 if there is none. In each function
    that returns the log-sum-exp, it is -inf for a query without visible keys.
    """

    arrays: str  # the axes of queries
    causal: str  # the alignment of a causal mask, if Lq ≠ Lk
    true: str  # the meaning of True in a mask
    numbers: str  # what the function does with a mask of numbers
    empty_row: str  # the output of a query without visible keys
    window: str  # what the size of a window counts on the left of a query
    shared_heads: str  # how query heads share key heads
    scale: str = "1/√D"  # the default
    lse: str = "no"  # the axes of the log-sum-exp, if returned


SEES, LEFT, NEAR, LSE = "may attend", "top left", "the keys before", "(B, H, Lq)"
BY_FUNCTION = {
    "minimha.attention": Conventions(
        "(B, H, L, D)", "q_offset decides", SEES, "refused", "0", NEAR, "by shapes", lse=LSE
    ),
    "torch.scaled_dot_product_attention": Conventions(
        "(..., H, L, D)", LEFT, SEES, "added", "0", "no window", "enable_gqa"
    ),
    "torch.flex_attention": Conventions(
        "(B, H, L, D)", LEFT, SEES, "refused", "0", "no window", "enable_gqa", lse=LSE
    ),
    "torch.multihead_attention": Conventions(
        "(L, B, E)", "the mask decides", "ignore", "added", "0", "no window", "no"
    ),
    "onnx.attention": Conventions(
        "(B, H, L, D)", "after the past", SEES, "added", "0", NEAR, "by shapes"
    ),
    "jax.dot_product_attention": Conventions(
        "(B, L, H, D)", LEFT, SEES, "refused", "mean of V", NEAR, "by shapes"
    ),
    "keras.multi_head_attention": Conventions(
        "(B, L, E)", LEFT, SEES, "refused", "mean of V", "its own key too", "another function"
    ),
    "flash_attention.flash_attn_func": Conventions(
        "(B, L, H, D)", "bottom right", "keep", "refused", "0", NEAR, "by shapes", lse=LSE
    ),
    "transformers.AttentionModule": Conventions(
        "(B, L, E)", "after the past", SEES, "added", "mean of V", "no window", "by config",
        "by class",
    ),
}  # fmt: skip
