/* Put ops into the [row, lane] cells of matrices. */
#include "kernels.h"

#include <string.h>

/* Where ops are: the first arguments of place_times, place_uniform and place_labels. */
typedef struct {
    const int32_t *step, *dp_rank, *seq, *group_of_lane;
    const int16_t *pp_rank;
    const uint8_t *kind;
    const int64_t *row_base;
    int64_t ops, dp_ranks, kinds, cells;
} Ops;

static Ops ops_of(Argument *a, Argument *row_base) {
    return (Ops){
        .step = INT32S(a[0]), .dp_rank = INT32S(a[1]), .pp_rank = INT16S(a[2]), .kind = BYTES(a[3]),
        .seq = INT32S(a[4]), .dp_ranks = a[5].integer, .kinds = a[6].integer, .group_of_lane = INT32S(a[7]),
        .row_base = INT64S(*row_base), .ops = AXIS(a[0], 0), .cells = AXIS(*row_base, 1),
    };
}

static inline int64_t lane_of(const Ops *ops, int64_t i) {
    return (int64_t)ops->step[i] * ops->dp_ranks + ops->dp_rank[i];
}

/* The row of op i within its group, -1 if the op has no place. */
static inline int64_t row_of(const Ops *ops, int64_t group, int64_t i) {
    if (group < 0) return -1;
    int64_t base = ops->row_base[group * ops->cells + ops->pp_rank[i] * ops->kinds + ops->kind[i]];
    return base < 0 ? -1 : base + ops->seq[i];
}

KERNEL(count_ops) {
    ENTER("count_ops", "iihBnn*i", 7);
    const int32_t *step = INT32S(a[0]), *dp_rank = INT32S(a[1]);
    const int16_t *pp_rank = INT16S(a[2]);
    const uint8_t *kind = BYTES(a[3]);
    const int64_t dp_ranks = a[4].integer, kinds = a[5].integer, cells = AXIS(a[6], 1), ops = AXIS(a[0], 0);
    int32_t *counts = INT32S(a[6]);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ops; i++)
        counts[((int64_t)step[i] * dp_ranks + dp_rank[i]) * cells + pp_rank[i] * kinds + kind[i]]++;
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}

KERNEL(place_times) {
    ENTER("place_times", "iihBinnilllldd*d*d", 16);
    const Ops ops = ops_of(a, &a[9]);
    const int64_t *column_of_lane = INT64S(a[8]), *lanes_in_group = INT64S(a[10]), *cell_offset = INT64S(a[11]);
    const double *start = REALS(a[12]), *duration = REALS(a[13]);
    double *start_out = REALS(a[14]), *duration_out = REALS(a[15]);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ops.ops; i++) {
        const int64_t lane = lane_of(&ops, i), group = ops.group_of_lane[lane], row = row_of(&ops, group, i);
        if (row < 0) continue;
        const int64_t cell = cell_offset[group] + row * lanes_in_group[group] + column_of_lane[lane];
        start_out[cell] = start[i];
        duration_out[cell] = duration[i];
    }
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}

KERNEL(place_uniform) {
    ENTER("place_uniform", "iihBinnililn*i*b", 14);
    const Ops ops = ops_of(a, &a[8]);
    const int32_t *values = INT32S(a[9]);
    const int64_t *row_offset = INT64S(a[10]);
    const int32_t unset = (int32_t)a[11].integer;
    int32_t *uniform = INT32S(a[12]);
    uint8_t *varies = BYTES(a[13]);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ops.ops; i++) {
        const int64_t group = ops.group_of_lane[lane_of(&ops, i)], row = row_of(&ops, group, i);
        if (row < 0) continue;
        int32_t *kept = &uniform[row_offset[group] + row];
        if (*kept == unset)
            *kept = values[i];
        else if (*kept != values[i])
            varies[group] = 1;
    }
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}

KERNEL(place_labels) {
    ENTER("place_labels", "iihBinnilllli*i", 14);
    const Ops ops = ops_of(a, &a[9]);
    const int64_t *column_of_lane = INT64S(a[8]), *lanes_in_group = INT64S(a[10]), *cell_offset = INT64S(a[11]);
    const int32_t *values = INT32S(a[12]);
    int32_t *out = INT32S(a[13]);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ops.ops; i++) {
        const int64_t lane = lane_of(&ops, i), group = ops.group_of_lane[lane], row = row_of(&ops, group, i);
        if (row < 0) continue;
        out[cell_offset[group] + row * lanes_in_group[group] + column_of_lane[lane]] = values[i];
    }
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}

/* How many lanes' starts are read together: two cache lines of doubles. */
enum { SIDE_BY_SIDE = 16 };

KERNEL(hash_streams) {
    ENTER("hash_streams", "dll*u", 4);
    const double *start = REALS(a[0]);
    const int64_t *bounds = INT64S(a[1]), *streams = INT64S(a[2]);
    uint64_t *signature = UINT64S(a[3]);
    const int64_t lanes = AXIS(a[0], 1), parts = AXIS(a[1], 0), count_streams = AXIS(a[2], 0) - 1;
    const int64_t rows = AXIS(a[0], 0);
    int64_t *heads = PyMem_Malloc((size_t)(parts + 1) * sizeof *heads);
    double *latest = PyMem_Malloc((size_t)(parts + 1) * sizeof *latest);
    double *some = PyMem_Malloc((size_t)(rows + 1) * SIDE_BY_SIDE * sizeof *some); /* of SIDE_BY_SIDE lanes */
    if (!heads || !latest || !some) {
        PyMem_Free(heads);
        PyMem_Free(latest);
        PyMem_Free(some);
        LEAVE(PyErr_NoMemory());
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t lane = 0; lane < lanes; lane++) {
        const int64_t place = lane % SIDE_BY_SIDE, width = lanes - lane < SIDE_BY_SIDE ? lanes - lane : SIDE_BY_SIDE;
        if (place == 0)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t row = bounds[2 * part]; row < bounds[2 * part + 1]; row++)
                    memcpy(some + row * SIDE_BY_SIDE, start + row * lanes + lane, (size_t)width * sizeof *some);
        uint64_t value = signature[lane];
        for (int64_t stream = 0; stream < count_streams; stream++) {
            const int64_t first = streams[stream], last = streams[stream + 1];
            for (int64_t part = first; part < last; part++) {
                heads[part] = bounds[2 * part];
                latest[part] = some[heads[part] * SIDE_BY_SIDE + place];
            }
            for (;;) {
                int64_t chosen = -1;
                for (int64_t part = first; part < last; part++)
                    if (heads[part] < bounds[2 * part + 1] && (chosen < 0 || latest[part] < latest[chosen]))
                        chosen = part;
                if (chosen < 0) break;
                value = (value ^ (uint64_t)(chosen + 1)) * UINT64_C(0x100000001B3);
                if (++heads[chosen] < bounds[2 * chosen + 1]) {
                    const double next = some[heads[chosen] * SIDE_BY_SIDE + place];
                    if (next > latest[chosen]) latest[chosen] = next;
                }
            }
        }
        signature[lane] = value;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(heads);
    PyMem_Free(latest);
    PyMem_Free(some);
    LEAVE(Py_NewRef(Py_None));
}
