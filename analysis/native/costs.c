/* Split recorded times into what each op cost by itself and waiting. */
#include "kernels.h"

KERNEL(rendezvous_starts) {
    ENTER("rendezvous_starts", "iiidi*d", 6);
    const int32_t *order = INT32S(a[0]), *first_of_group = INT32S(a[1]), *rendezvous = INT32S(a[2]);
    const double *start = REALS(a[3]);
    const int32_t *step = INT32S(a[4]);
    double *rendezvous_start = REALS(a[5]);
    const int64_t groups = AXIS(a[2], 0), lanes = AXIS(a[3], 1), steps = AXIS(a[5], 1);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t group = 0; group < groups; group++) {
        if (rendezvous[group] < 0) continue;
        double *latest = rendezvous_start + rendezvous[group] * steps;
        for (int64_t position = first_of_group[group]; position < first_of_group[group + 1]; position++) {
            const double *begin = start + order[position] * lanes;
            for (int64_t i = 0; i < lanes; i++)
                if (begin[i] > latest[step[i]]) latest[step[i]] = begin[i];
        }
    }
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}

KERNEL(transfer_durations) {
    ENTER("transfer_durations", "iiibdidr*d", 9);
    const int32_t *order = INT32S(a[0]), *first_of_group = INT32S(a[1]), *rendezvous = INT32S(a[2]);
    const uint8_t *is_communication = BYTES(a[3]);
    const double *start = REALS(a[4]), *rendezvous_start = REALS(a[6]);
    const int32_t *step = INT32S(a[5]);
    const double lowest = a[7].real;
    double *cost = REALS(a[8]);
    const int64_t groups = AXIS(a[2], 0), lanes = AXIS(a[4], 1), steps = AXIS(a[6], 1);
    double *latest = PyMem_Malloc((size_t)(lanes + 1) * sizeof *latest);
    if (!latest) LEAVE(PyErr_NoMemory());
    int64_t clamped = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t group = 0; group < groups; group++) {
        const int64_t first = first_of_group[group], last = first_of_group[group + 1];
        if (!is_communication[order[first]] || (last - first == 1 && rendezvous[group] < 0)) continue;
        if (rendezvous[group] >= 0) {
            for (int64_t i = 0; i < lanes; i++) latest[i] = rendezvous_start[rendezvous[group] * steps + step[i]];
        } else {
            for (int64_t i = 0; i < lanes; i++) latest[i] = start[order[first] * lanes + i];
            for (int64_t position = first + 1; position < last; position++) {
                const double *begin = start + order[position] * lanes;
                for (int64_t i = 0; i < lanes; i++) latest[i] = begin[i] > latest[i] ? begin[i] : latest[i];
            }
        }
        for (int64_t position = first; position < last; position++) {
            const double *begin = start + order[position] * lanes;
            double *transfer = cost + order[position] * lanes;
            for (int64_t i = 0; i < lanes; i++) {
                const double value = begin[i] + transfer[i] - latest[i];
                clamped += value < lowest;
                transfer[i] = value < lowest ? 0.0 : value;
            }
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(latest);
    LEAVE(PyLong_FromLongLong(clamped));
}

KERNEL(launch_delays) {
    ENTER("launch_delays", "iiddr*d", 6);
    const int32_t *first_wait = INT32S(a[0]), *waits_for = INT32S(a[1]);
    const double *start = REALS(a[2]), *duration = REALS(a[3]);
    const double lowest = a[4].real;
    double *delay = REALS(a[5]);
    const int64_t rows = AXIS(a[2], 0), lanes = AXIS(a[2], 1);
    double *ready = PyMem_Malloc((size_t)(lanes + 1) * sizeof *ready);
    if (!ready) LEAVE(PyErr_NoMemory());
    int64_t clamped = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; row < rows; row++) {
        if (first_wait[row] == first_wait[row + 1]) continue;
        for (int64_t wait = first_wait[row]; wait < first_wait[row + 1]; wait++) {
            const double *begin = start + waits_for[wait] * lanes, *taken_s = duration + waits_for[wait] * lanes;
            if (wait == first_wait[row])
                for (int64_t i = 0; i < lanes; i++) ready[i] = begin[i] + taken_s[i];
            else
                for (int64_t i = 0; i < lanes; i++) {
                    const double end = begin[i] + taken_s[i];
                    ready[i] = end > ready[i] ? end : ready[i];
                }
        }
        for (int64_t i = 0; i < lanes; i++) {
            const double value = start[row * lanes + i] - ready[i];
            clamped += value < lowest;
            delay[row * lanes + i] = value < lowest ? 0.0 : value;
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(ready);
    LEAVE(PyLong_FromLongLong(clamped));
}
