// V x V elements per thread: an element of A serves V columns, B is read again for every row.
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int N) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    int column = (blockIdx.y * blockDim.y + threadIdx.y) * V;
    for (int x = 0; x < V; ++x) {
        float c[V] = {};
        for (int k = 0; k < N; ++k) {
            float a = A[(row + x) * N + k];
            #pragma unroll
            for (int y = 0; y < V; ++y) {
                c[y] += a * B[k * N + column + y];
            }
        }
        #pragma unroll
        for (int y = 0; y < V; ++y) {
            C[(row + x) * N + column + y] = c[y];
        }
    }
}
