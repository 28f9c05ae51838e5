"""The guide's part on the GPU matmul ladder: chapter, exercises, drawings. The kernels are in kernels/ladder."""
