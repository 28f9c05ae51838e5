// As before, with no bank asked twice: rows of sA end in PAD unused elements, and a thread's columns lie SIDE apart.
constexpr int SIDE = L / V;           // threads along one side of a block
constexpr int THREADS = SIDE * SIDE;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const float* A, const float* B, float* C, int N) {
    __shared__ float sA[S][L + PAD];
    __shared__ float sB[S][L];
    int thread = threadIdx.x;
    int ty = thread / SIDE, tx = thread % SIDE;
    int row = blockIdx.y * L, column = blockIdx.x * L;
    float c[V][V] = {};
    float a[V], b[V];
    for (int ko = 0; ko < N; ko += S) {
        #pragma unroll
        for (int i = 0; i < L * S / THREADS; ++i) {
            int element = i * THREADS + thread;
            sA[element % S][element / S] = A[(row + element / S) * N + ko + element % S];  // neighbours in one row
            sB[element / L][element % L] = B[(ko + element / L) * N + column + element % L];
        }
        __syncthreads();  // the tiles are complete
        #pragma unroll
        for (int k = 0; k < S; ++k) {
            #pragma unroll
            for (int x = 0; x < V; ++x) {
                a[x] = sA[k][ty * V + x];
                b[x] = sB[k][x * SIDE + tx];
            }
            #pragma unroll
            for (int x = 0; x < V; ++x) {
                #pragma unroll
                for (int y = 0; y < V; ++y) {
                    c[x][y] += a[x] * b[y];
                }
            }
        }
        __syncthreads();  // all have read them: the next ones may be written
    }
    #pragma unroll
    for (int x = 0; x < V; ++x) {
        #pragma unroll
        for (int y = 0; y < V; ++y) {
            C[(row + ty * V + x) * N + column + y * SIDE + tx] = c[x][y];
        }
    }
}
