// A dot product: OpenMP cuts the loop, gives each thread a part and adds up what they found.
#include <omp.h>

double dot(const float* a, const float* b, long n, int threads) {
    double sum = 0.0;
#pragma omp parallel for reduction(+ : sum) num_threads(threads) schedule(static)
    for (long i = 0; i < n; ++i) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

int most_threads(void) { return omp_get_max_threads(); }
