// Each thread copies one element; those of neighbouring threads lie STRIDE apart.
extern "C" __global__ void copy(const float* input, float* output, int N) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    output[index] = input[index % (N / STRIDE) * STRIDE + index / (N / STRIDE)];
}
