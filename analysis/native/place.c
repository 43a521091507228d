/* Put ops into the [row, lane] cells of matrices. */
#include "kernels.h"

#include <string.h>

/* How many lanes' starts are read together: two cache lines of doubles. */
enum { SIDE_BY_SIDE = 16 };

/* Fill the lanes `begin` to `end` of [rows, lanes] with the values of their ops. */
#define GATHER(name, code, type)                                                                             \
    KERNEL(name) {                                                                                           \
        ENTER(#name, code "llllnn*" code, 8);                                                                \
        const type *values = a[0].view.buf;                                                                  \
        const int64_t *first = INT64S(a[1]), *lane = INT64S(a[2]), *cell = INT64S(a[3]), *seq = INT64S(a[4]); \
        const int64_t begin = a[5].integer, end = a[6].integer, cells = AXIS(a[1], 1);                       \
        const int64_t rows = AXIS(a[7], 0), lanes = AXIS(a[7], 1);                                           \
        type *out = a[7].view.buf;                                                                           \
        Py_BEGIN_ALLOW_THREADS                                                                               \
        for (int64_t block = begin; block < end; block += SIDE_BY_SIDE) {                                       \
            const int64_t after = block + SIDE_BY_SIDE < end ? block + SIDE_BY_SIDE : end;                     \
            for (int64_t row = 0; row < rows; row++)                                                         \
                for (int64_t i = block; i < after; i++)                                                       \
                    out[row * lanes + i] = values[first[lane[i] * cells + cell[row]] + seq[row]];            \
        }                                                                                                    \
        Py_END_ALLOW_THREADS                                                                                 \
        LEAVE(Py_NewRef(Py_None));                                                                           \
    }

GATHER(gather_times, "d", double)
GATHER(gather_labels, "i", int32_t)

KERNEL(hash_streams) {
    ENTER("hash_streams", "dll*u", 4);
    const double *start = REALS(a[0]);
    const int64_t *bounds = INT64S(a[1]), *streams = INT64S(a[2]);
    uint64_t *signature = UINT64S(a[3]);
    const int64_t lanes = AXIS(a[0], 1), parts = AXIS(a[1], 0), count_streams = AXIS(a[2], 0) - 1;
    const int64_t rows = AXIS(a[0], 0);
    int64_t *heads = PyMem_Malloc((size_t)(parts + 1) * sizeof *heads);
    double *latest = PyMem_Malloc((size_t)(parts + 1) * sizeof *latest);
    double *block = PyMem_Malloc((size_t)(rows + 1) * SIDE_BY_SIDE * sizeof *block); /* of SIDE_BY_SIDE lanes */
    if (!heads || !latest || !block) {
        PyMem_Free(heads);
        PyMem_Free(latest);
        PyMem_Free(block);
        LEAVE(PyErr_NoMemory());
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t lane = 0; lane < lanes; lane++) {
        const int64_t place = lane % SIDE_BY_SIDE, width = lanes - lane < SIDE_BY_SIDE ? lanes - lane : SIDE_BY_SIDE;
        if (place == 0)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t row = bounds[2 * part]; row < bounds[2 * part + 1]; row++)
                    memcpy(block + row * SIDE_BY_SIDE, start + row * lanes + lane, (size_t)width * sizeof *block);
        uint64_t value = signature[lane];
        for (int64_t stream = 0; stream < count_streams; stream++) {
            const int64_t first = streams[stream], last = streams[stream + 1];
            for (int64_t part = first; part < last; part++) {
                heads[part] = bounds[2 * part];
                latest[part] = block[heads[part] * SIDE_BY_SIDE + place];
            }
            for (;;) {
                int64_t chosen = -1;
                for (int64_t part = first; part < last; part++)
                    if (heads[part] < bounds[2 * part + 1] && (chosen < 0 || latest[part] < latest[chosen]))
                        chosen = part;
                if (chosen < 0) break;
                value = (value ^ (uint64_t)(chosen + 1)) * UINT64_C(0x100000001B3);
                if (++heads[chosen] < bounds[2 * chosen + 1]) {
                    const double next = block[heads[chosen] * SIDE_BY_SIDE + place];
                    if (next > latest[chosen]) latest[chosen] = next;
                }
            }
        }
        signature[lane] = value;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(heads);
    PyMem_Free(latest);
    PyMem_Free(block);
    LEAVE(Py_NewRef(Py_None));
}
