/* What a kernel is called with: numbers and C-contiguous arrays, checked once at the door. */
#ifndef TRACEKIT_ARGUMENTS_H
#define TRACEKIT_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    Py_buffer view; /* of an array; view.obj is NULL for a number */
    int64_t integer;
    double real;
} Argument;

/*
 * Fill `out` from `args` by `spec`, a character for each argument; 0, or -1 with a Python error set.
 *
 * b bool, B uint8, h int16, i int32, l int64, u uint64, d float64: an array of that type. In front of it, * where the
 * kernel writes to the array. n: an integer. r: a real number.
 */
int arguments_take(const char *function, const char *spec, PyObject *const *args, Py_ssize_t count, Argument *out);

/* Give the arrays back. */
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
 * Opens a kernel that is called as name(args): declares `a`, checked arguments. LEAVE gives them back and returns
 * `result`, a new reference or NULL.
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

/* A version for CPUs with wide vectors is chosen when the library is loaded, where compiler and loader can do that. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && (defined(__GNUC__) && !defined(__clang__))
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#endif
