// Multiplies matrices of numbers row by row, as the textbook has it: each row of the result goes once
// through the whole second matrix. Then checks the result by a vector (Freivalds).
// Arguments: columns, and rows of the first matrix. Prints the seconds of the product.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static unsigned *zeros(size_t numbers) {
    void *at = mmap(NULL, numbers * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(3);
    return at;
}

static unsigned *filled(size_t numbers, unsigned seed) {
    unsigned *at = zeros(numbers);
    for (size_t i = 0; i < numbers; i++) at[i] = seed = seed * 1664525u + 1013904223u;
    return at;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

// `to` is `from`, a matrix of so many rows, times a vector.
static void times(unsigned *to, const unsigned *from, const unsigned *vector, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i++) {
        unsigned sum = 0;
        for (size_t k = 0; k < columns; k++) sum += from[i * columns + k] * vector[k];
        to[i] = sum;
    }
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    size_t columns = strtoul(arguments[1], 0, 10), rows = strtoul(arguments[2], 0, 10);
    unsigned *a = filled(rows * columns, 1), *b = filled(columns * columns, 2), *c = zeros(rows * columns);
    double began = seconds();
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < columns; k++) {
            unsigned of_a = a[i * columns + k];
            const unsigned *of_b = b + k * columns;
            unsigned *of_c = c + i * columns;
            for (size_t j = 0; j < columns; j++) of_c[j] += of_a * of_b[j];
        }
    double took = seconds() - began;
    unsigned *vector = filled(columns, 3), *bv = zeros(columns), *abv = zeros(rows), *cv = zeros(rows);
    times(bv, b, vector, columns, columns);
    times(abv, a, bv, rows, columns);
    times(cv, c, vector, rows, columns);
    size_t wrong = 0;
    for (size_t i = 0; i < rows; i++) wrong += abv[i] != cv[i];
    printf("%.3f %zu wrong\n", took, wrong);
    return wrong != 0;
}
