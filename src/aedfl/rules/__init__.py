"""The maths of one local update as pure functions on tensors: weigh, merge, select.

Every function is batched over devices in its leading dimension B; M neighbour slots are padded and
come with a validity mask. What one device gets never depends on the others in the batch nor on the
padding: scalars are computed in float64, sums over slots run in slot order, and sums over
parameters go through `reduce`.
"""
