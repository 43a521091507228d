/* A kernel's arguments: numbers and C-contiguous arrays, checked once, on entry. */
#ifndef TRACEKIT_ARGUMENTS_H
#define TRACEKIT_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    Py_buffer view; /* of an array; if the argument is a number, view.obj is NULL */
    int64_t integer;
    double real;
} Argument;

/*
 * Fill `out` from `args`. `spec` has one character per argument. Returns 0, or -1 with a Python exception set.
 *
 * b bool, B uint8, h int16, i int32, l int64, u uint64, d float64: an array of that type, with * before the letter if
 * the kernel writes to the array. n: an integer. r: a real number.
 */
int arguments_take(const char *function, const char *spec, PyObject *const *args, Py_ssize_t count, Argument *out);

/* Release the arrays. */
void arguments_release(Argument *arguments, Py_ssize_t count);

/* The elements of an array. */
#define BYTES(a) ((uint8_t *)(a).view.buf)
#define INT16S(a) ((int16_t *)(a).view.buf)
#define INT32S(a) ((int32_t *)(a).view.buf)
#define INT64S(a) ((int64_t *)(a).view.buf)
#define UINT64S(a) ((uint64_t *)(a).view.buf)
#define REALS(a) ((double *)(a).view.buf)

/* The length of an axis of an array. */
#define AXIS(a, axis) ((int64_t)(a).view.shape[axis])

/*
 * ENTER begins a kernel: it declares `a`, the checked arguments. LEAVE releases them and returns `result`, a new
 * reference or NULL.
 */
#define ENTER(function, spec, size)                                                        \
    (void)module;                                                                          \
    Argument a[size];                                                                      \
    if (arguments_take(function, spec, args, count, a) < 0) return NULL
#define LEAVE(result)                                                                      \
    do {                                                                                   \
        PyObject *leaving = (result);                                                      \
        arguments_release(a, (Py_ssize_t)(sizeof a / sizeof a[0]));                        \
        return leaving;                                                                    \
    } while (0)

#define KERNEL(name) PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t count)

/* If compiler and loader support it, the version for CPUs with wide vectors is chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && (defined(__GNUC__) && !defined(__clang__))
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#endif
