/* Divides host ops among what their threads did. */
#include "kernels.h"

#include <stdlib.h>

static int ascending(const void *one, const void *other) {
    const int32_t left = *(const int32_t *)one, right = *(const int32_t *)other;
    return (left > right) - (left < right);
}

KERNEL(divide_work) {
    ENTER("divide_work", "ddllddiinr*l*i*d*i", 14);
    const double *begin = REALS(a[0]), *end = REALS(a[1]), *start = REALS(a[4]), *stop = REALS(a[5]);
    const int64_t *first = INT64S(a[2]), *last = INT64S(a[3]);
    const int32_t *what = INT32S(a[6]), *number = INT32S(a[7]);
    const int64_t ops = AXIS(a[0], 0), numbers = a[8].integer;
    const double shortest = a[9].real;
    int64_t *bound = INT64S(a[10]), written = 0;
    int32_t *did = INT32S(a[11]), *pieces = INT32S(a[13]), unrecorded = number[AXIS(a[7], 0) - 1];
    double *seconds = REALS(a[12]);
    int32_t *found = PyMem_Malloc(sizeof *found * (size_t)(numbers + 1)), *times = PyMem_Calloc((size_t)numbers + 1, sizeof *times);
    double *spent = PyMem_Calloc((size_t)numbers + 1, sizeof *spent);
    if (!found || !times || !spent) PyErr_NoMemory();
    else
        for (int64_t op = 0; op < ops; op++) {
            size_t count = 0;
            double recorded = 0.0;
            for (int64_t piece = first[op]; piece <= last[op]; piece++) {
                int32_t here = unrecorded;
                double shared = end[op] - begin[op] - recorded;
                if (piece < last[op]) {
                    here = number[what[piece]];
                    shared = (stop[piece] < end[op] ? stop[piece] : end[op]) - (start[piece] > begin[op] ? start[piece] : begin[op]);
                    recorded += shared;
                }
                if (!times[here]++) found[count++] = here;
                spent[here] += shared;
            }
            qsort(found, count, sizeof *found, ascending);
            for (size_t i = 0; i < count; i++) {
                if (spent[found[i]] > shortest) {
                    did[written] = found[i];
                    seconds[written] = spent[found[i]];
                    pieces[written++] = times[found[i]];
                }
                spent[found[i]] = 0.0;
                times[found[i]] = 0;
            }
            bound[op + 1] = written;
        }
    PyMem_Free(found);
    PyMem_Free(times);
    PyMem_Free(spent);
    LEAVE(PyErr_Occurred() ? NULL : PyLong_FromLongLong(written));
}
