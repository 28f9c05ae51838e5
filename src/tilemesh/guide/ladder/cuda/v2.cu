// V x V elements per thread as a sum of outer products: V elements of A and V of B serve V * V products.
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int N) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    int column = (blockIdx.y * blockDim.y + threadIdx.y) * V;
    float c[V][V] = {};
    float a[V], b[V];
    for (int k = 0; k < N; ++k) {
        #pragma unroll
        for (int x = 0; x < V; ++x) {
            a[x] = A[(row + x) * N + k];
            b[x] = B[k * N + column + x];
        }
        #pragma unroll
        for (int x = 0; x < V; ++x) {
            #pragma unroll
            for (int y = 0; y < V; ++y) {
                c[x][y] += a[x] * b[y];
            }
        }
    }
    #pragma unroll
    for (int x = 0; x < V; ++x) {
        #pragma unroll
        for (int y = 0; y < V; ++y) {
            C[(row + x) * N + column + y] = c[x][y];
        }
    }
}
