/* Divides host ops among what their threads did. */
#include "kernels.h"

#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    const int32_t left = *(const int32_t *)a, right = *(const int32_t *)b;
    return (left > right) - (left < right);
}

KERNEL(divide_work) {
    ENTER("divide_work", "ddllddiinr*l*i*d*i", 14);
    const double *begin = REALS(a[0]), *end = REALS(a[1]), *start = REALS(a[4]), *stop = REALS(a[5]);
    const int64_t *first = INT64S(a[2]), *last = INT64S(a[3]);
    const int32_t *activity_of_piece = INT32S(a[6]), *number = INT32S(a[7]);
    const int64_t ops = AXIS(a[0], 0), numbers = a[8].integer;
    const double shortest = a[9].real;
    int64_t *bound = INT64S(a[10]), written = 0;
    int32_t *did = INT32S(a[11]), *pieces = INT32S(a[13]), unrecorded = number[AXIS(a[7], 0) - 1];
    double *seconds = REALS(a[12]);
    int32_t *done = PyMem_Malloc(sizeof *done * (size_t)(numbers + 1)), *times = PyMem_Calloc((size_t)numbers + 1, sizeof *times);
    double *spent = PyMem_Calloc((size_t)numbers + 1, sizeof *spent);
    if (!done || !times || !spent) PyErr_NoMemory();
    else
        for (int64_t op = 0; op < ops; op++) {
            size_t count = 0;
            double recorded = 0.0;
            for (int64_t piece = first[op]; piece <= last[op]; piece++) {
                int32_t activity = unrecorded;
                double shared = end[op] - begin[op] - recorded;
                if (piece < last[op]) {
                    activity = number[activity_of_piece[piece]];
                    shared = (stop[piece] < end[op] ? stop[piece] : end[op]) - (start[piece] > begin[op] ? start[piece] : begin[op]);
                    recorded += shared;
                }
                if (!times[activity]++) done[count++] = activity;
                spent[activity] += shared;
            }
            qsort(done, count, sizeof *done, ascending);
            for (size_t i = 0; i < count; i++) {
                if (spent[done[i]] > shortest) {
                    did[written] = done[i];
                    seconds[written] = spent[done[i]];
                    pieces[written++] = times[done[i]];
                }
                spent[done[i]] = 0.0;
                times[done[i]] = 0;
            }
            bound[op + 1] = written;
        }
    PyMem_Free(done);
    PyMem_Free(times);
    PyMem_Free(spent);
    LEAVE(PyErr_Occurred() ? NULL : PyLong_FromLongLong(written));
}
