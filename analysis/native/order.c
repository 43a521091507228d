/* For the ops of a template: an order in which they can be replayed, the rounds, and the buffers for end times. */
#include "kernels.h"

KERNEL(replay_order) {
    ENTER("replay_order", "iiiiii*i", 7);
    const int32_t *group = INT32S(a[0]), *by_group = INT32S(a[1]), *first_of_group = INT32S(a[2]);
    const int32_t *first_next = INT32S(a[3]), *nexts = INT32S(a[4]), *waits = INT32S(a[5]);
    int32_t *ordered = INT32S(a[6]);
    const int64_t rows = AXIS(a[0], 0), groups = AXIS(a[6], 0);
    int32_t *open_waits = PyMem_Calloc((size_t)groups + 1, sizeof *open_waits);
    if (!open_waits) LEAVE(PyErr_NoMemory());
    int64_t ordered_count = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; row < rows; row++) open_waits[group[row]] += waits[row];
    for (int32_t number = 0; number < groups; number++)
        if (open_waits[number] == 0) ordered[ordered_count++] = number;
    for (int64_t done = 0; done < ordered_count; done++) {
        const int64_t number = ordered[done];
        for (int64_t position = first_of_group[number]; position < first_of_group[number + 1]; position++) {
            const int64_t row = by_group[position];
            for (int64_t edge = first_next[row]; edge < first_next[row + 1]; edge++) {
                const int32_t after = group[nexts[edge]];
                if (--open_waits[after] == 0) ordered[ordered_count++] = after;
            }
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(open_waits);
    LEAVE(PyLong_FromLongLong(ordered_count));
}

KERNEL(rounds) {
    ENTER("rounds", "iiiiiiii*i", 9);
    const int32_t *ordered = INT32S(a[0]), *by_group = INT32S(a[1]), *first_of_group = INT32S(a[2]);
    const int32_t *first_wait = INT32S(a[3]), *waits_for = INT32S(a[4]), *group = INT32S(a[5]);
    const int32_t *rendezvous = INT32S(a[6]), *of_rendezvous = INT32S(a[7]);
    int32_t *number = INT32S(a[8]);
    const int64_t groups = AXIS(a[0], 0);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < groups; i++) {
        const int64_t current = ordered[i];
        int32_t latest = 0;
        for (int64_t position = first_of_group[current]; position < first_of_group[current + 1]; position++)
            for (int64_t wait = first_wait[by_group[position]]; wait < first_wait[by_group[position] + 1]; wait++) {
                const int64_t before = group[waits_for[wait]];
                const int32_t earliest = number[before] + (rendezvous[before] >= 0);
                if (earliest > latest) latest = earliest;
            }
        if (rendezvous[current] >= 0 && of_rendezvous[rendezvous[current]] > latest) latest = of_rendezvous[rendezvous[current]];
        number[current] = latest;
    }
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}

KERNEL(assign_buffers) {
    ENTER("assign_buffers", "iiiii*i", 6);
    const int32_t *order = INT32S(a[0]), *first_of_group = INT32S(a[1]), *first_wait = INT32S(a[2]);
    const int32_t *waits_for = INT32S(a[3]), *unit = INT32S(a[4]);
    int32_t *buffer = INT32S(a[5]);
    const int64_t rows = AXIS(a[0], 0), groups = AXIS(a[4], 0);
    int32_t *last_use = PyMem_Malloc((size_t)(rows + 1) * sizeof *last_use);
    int32_t *free_buffers = PyMem_Malloc((size_t)(rows + 1) * sizeof *free_buffers);
    uint8_t *released = PyMem_Calloc((size_t)rows + 1, 1);
    if (!last_use || !free_buffers || !released) {
        PyMem_Free(last_use);
        PyMem_Free(free_buffers);
        PyMem_Free(released);
        LEAVE(PyErr_NoMemory());
    }
    int64_t free_count = 0, begin = 0;
    int32_t buffer_count = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t number = 0; number < groups; number++)
        for (int64_t position = first_of_group[number]; position < first_of_group[number + 1]; position++) {
            last_use[order[position]] = unit[number];
            for (int64_t wait = first_wait[order[position]]; wait < first_wait[order[position] + 1]; wait++)
                last_use[waits_for[wait]] = unit[number];
        }
    for (int64_t number = 0; number < groups; number++) {
        for (int64_t position = first_of_group[number]; position < first_of_group[number + 1]; position++)
            buffer[order[position]] = free_count > 0 ? free_buffers[--free_count] : buffer_count++;
        if (number + 1 < groups && unit[number + 1] == unit[number]) continue;
        for (int64_t position = begin; position < first_of_group[number + 1]; position++) {
            const int64_t row = order[position];
            if (last_use[row] == unit[number] && !released[row]) {
                released[row] = 1;
                free_buffers[free_count++] = buffer[row];
            }
            for (int64_t wait = first_wait[row]; wait < first_wait[row + 1]; wait++) {
                const int64_t before = waits_for[wait];
                if (last_use[before] == unit[number] && !released[before]) {
                    released[before] = 1;
                    free_buffers[free_count++] = buffer[before];
                }
            }
        }
        begin = first_of_group[number + 1];
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(last_use);
    PyMem_Free(free_buffers);
    PyMem_Free(released);
    LEAVE(PyLong_FromLongLong(buffer_count));
}
