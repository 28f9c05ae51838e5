// c = a + b, one element at a time and four at a time. The first is kept from being vectorised by the compiler.
typedef float four __attribute__((vector_size(16)));

__attribute__((optimize("no-tree-vectorize"), noinline)) void one_by_one(const float* a, const float* b, float* c, long n) {
#pragma GCC novector
    for (long i = 0; i < n; ++i) {
        c[i] = a[i] + b[i];
    }
}

void four_by_four(const float* a, const float* b, float* c, long n) {
    const four* fa = (const four*)a;
    const four* fb = (const four*)b;
    four* fc = (four*)c;
    for (long i = 0; i < n / 4; ++i) {
        fc[i] = fa[i] + fb[i];
    }
}
