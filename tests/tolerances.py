"""The one table of tolerances. A number changes only with a reason in the commit."""

import torch

# Against a float32 reference, relative and absolute alike: one rounding of the dtype and some
# slack for a different order of summation.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
FP8_KV = 5e-2  # e4m3 keeps 3 mantissa bits: 2^-4 relative a channel, averaged by the softmax

# Largest absolute logit difference to transformers in float32, logits of unit scale.
LOGITS = {
    "llama": 1e-5,
    "deepseek_v4": 1e-5,
    # The absorbed form multiplies W_UK and W_UV in another order than the reference does: 1.5e-5.
    "glm_moe_dsa": 5e-5,
}

# GEMM and MoE: 1 - 2<x,y> / (<x,x> + <y,y>).
GEMM_DISTANCE = {torch.bfloat16: 1e-5, "fp8": 1e-3, "fp4": 1e-2}
MOE_DISTANCE = 3e-5  # bfloat16: two products in a row, the hidden layer rounded between them

# Relative difference of a prompt's time put together from some of its steps to that of all steps:
# links that take most of the time are kept to, computation on a shared machine is not.
PROMPT_TIME = 0.25

# Largest difference of a log probability between a layout and one rank, float32: sums over ranks
# are added in another order. GLM's absorbed products amplify it.
LAYOUT = {"llama": 1e-5, "deepseek_v4": 1e-5, "glm_moe_dsa": 2e-4}

# How much larger differences in float32 may be on a GPU, of logits to those of the CPU and of a
# layout to one rank: there each kernel, and the same kernel at another size, sums in its own order.
GPU_SLACK = 20
