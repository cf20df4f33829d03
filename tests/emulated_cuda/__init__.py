"""A CUDA GPU made of ordinary memory, on which the code for CUDA runs as it is: `with EmulatedGpu(seed=3) as gpu:`.

Tensors say that they are on "cuda:0" and keep their values in host memory. What is asked of them is queued on the
current stream and done late, in any order that the streams' events allow, and only when something waits for it: a copy
or a kernel that does not wait for what it needs reads NaN, or what was there before. Memory that is let go of is filled
with NaN in the order of the stream it came from, as an allocator that hands it out again would. Operations refuse
tensors of two devices as CUDA does, and what makes the host wait is counted.

Not emulated: times, limits of memory, compilers (`compiled_flex` is what stands in for a kernel), and which thread a
current stream belongs to beyond `torch.cuda.stream`. A torch that was built without CUDA is told of the device by a few
lines of C++.

Imports: torch; nothing of the package under test.
"""

from emulated_cuda.gpu import EmulatedGpu
from emulated_cuda.kernels import FLASH, compiled_flex

__all__ = ["FLASH", "EmulatedGpu", "compiled_flex"]
