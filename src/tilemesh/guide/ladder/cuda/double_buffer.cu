// As before, with two tiles of A and B in shared memory: while one is multiplied, the next is on its way in registers.
constexpr int SIDE = L / V;
constexpr int THREADS = SIDE * SIDE;
constexpr int FETCHES = L * S / 4 / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const float* A, const float* B, float* C, int N) {
    __shared__ __align__(16) float sA[2][S][L + PAD];
    __shared__ __align__(16) float sB[2][S][L];
    int thread = threadIdx.x;
    int ty = thread / SIDE, tx = thread % SIDE;
    int row = blockIdx.y * L, column = blockIdx.x * L;
    float c[V][V] = {};
    float a[V], b[V];
    float4 nextA[FETCHES], nextB[FETCHES];
    #pragma unroll
    for (int i = 0; i < FETCHES; ++i) {
        int element = (i * THREADS + thread) * 4;
        nextA[i] = reinterpret_cast<const float4*>(&A[(row + element / S) * N + element % S])[0];
        nextB[i] = reinterpret_cast<const float4*>(&B[element / L * N + column + element % L])[0];
    }
    #pragma unroll
    for (int i = 0; i < FETCHES; ++i) {
        int element = (i * THREADS + thread) * 4;
        int ka = element % S, ra = element / S;
        sA[0][ka][ra] = nextA[i].x;
        sA[0][ka + 1][ra] = nextA[i].y;
        sA[0][ka + 2][ra] = nextA[i].z;
        sA[0][ka + 3][ra] = nextA[i].w;
        reinterpret_cast<float4*>(&sB[0][element / L][element % L])[0] = nextB[i];
    }
    __syncthreads();
    for (int ko = 0; ko < N; ko += S) {
        int now = ko / S % 2;
        if (ko + S < N) {
            #pragma unroll
            for (int i = 0; i < FETCHES; ++i) {
                int element = (i * THREADS + thread) * 4;
                nextA[i] = reinterpret_cast<const float4*>(&A[(row + element / S) * N + ko + S + element % S])[0];
                nextB[i] = reinterpret_cast<const float4*>(&B[(ko + S + element / L) * N + column + element % L])[0];
            }
        }
        #pragma unroll
        for (int k = 0; k < S; ++k) {
            #pragma unroll
            for (int q = 0; q < V / 4; ++q) {
                float4 down = reinterpret_cast<const float4*>(&sA[now][k][ty * V + q * 4])[0];
                float4 across = reinterpret_cast<const float4*>(&sB[now][k][(q * SIDE + tx) * 4])[0];
                a[q * 4] = down.x;
                a[q * 4 + 1] = down.y;
                a[q * 4 + 2] = down.z;
                a[q * 4 + 3] = down.w;
                b[q * 4] = across.x;
                b[q * 4 + 1] = across.y;
                b[q * 4 + 2] = across.z;
                b[q * 4 + 3] = across.w;
            }
            #pragma unroll
            for (int x = 0; x < V; ++x) {
                #pragma unroll
                for (int y = 0; y < V; ++y) {
                    c[x][y] += a[x] * b[y];
                }
            }
        }
        if (ko + S < N) {
            #pragma unroll
            for (int i = 0; i < FETCHES; ++i) {
                int element = (i * THREADS + thread) * 4;
                int ka = element % S, ra = element / S;
                sA[1 - now][ka][ra] = nextA[i].x;
                sA[1 - now][ka + 1][ra] = nextA[i].y;
                sA[1 - now][ka + 2][ra] = nextA[i].z;
                sA[1 - now][ka + 3][ra] = nextA[i].w;
                reinterpret_cast<float4*>(&sB[1 - now][element / L][element % L])[0] = nextB[i];
            }
        }
        __syncthreads();  // one barrier for each tile is enough
    }
    #pragma unroll
    for (int x = 0; x < V; ++x) {
        #pragma unroll
        for (int q = 0; q < V / 4; ++q) {
            float4 quad;
            quad.x = c[x][q * 4];
            quad.y = c[x][q * 4 + 1];
            quad.z = c[x][q * 4 + 2];
            quad.w = c[x][q * 4 + 3];
            reinterpret_cast<float4*>(&C[(row + ty * V + x) * N + column + (q * SIDE + tx) * 4])[0] = quad;
        }
    }
}
