/* The critical path of each step: from its last op back through what each op waited for. */
#include "kernels.h"

typedef struct {
    const int32_t *first_wait, *waits_for, *order, *first_of_group, *group_of_row, *rendezvous;
    const uint8_t *is_communication;
    const double *start, *end;
    int64_t lanes, lane_first, lane_last;
    int apart;
} Step;

/* Find the last to arrive of the ops that start with this one. Returns 0 if some of them are in other graphs. */
static int latest_member(const Step *s, int64_t row, int64_t lane, int64_t *late_row, int64_t *late_lane) {
    *late_row = row;
    *late_lane = lane;
    if (!s->is_communication[row]) return 1;
    const int64_t group = s->group_of_row[row];
    const int meets = s->rendezvous[group] >= 0;
    if (meets && s->apart) return 0;
    const int64_t first_lane = meets ? s->lane_first : lane, last_lane = meets ? s->lane_last : lane + 1;
    double latest = s->start[row * s->lanes + lane];
    for (int64_t position = s->first_of_group[group]; position < s->first_of_group[group + 1]; position++) {
        const double *start = s->start + s->order[position] * s->lanes;
        for (int64_t i = first_lane; i < last_lane; i++)
            if (start[i] > latest) {
                latest = start[i];
                *late_row = s->order[position];
                *late_lane = i;
            }
    }
    return 1;
}

/* Walk back from one op. Returns the number of ops on the path. */
static int64_t walk(const Step *s, int64_t row, int64_t lane, int64_t capacity, int64_t *rows, int64_t *lanes,
                    int64_t *late_rows, int64_t *late_lanes) {
    int64_t length = 0;
    while (length < capacity) {
        rows[length] = row;
        lanes[length] = lane;
        if (!latest_member(s, row, lane, &late_rows[length], &late_lanes[length])) {
            late_rows[length] = late_lanes[length] = -1;
            return length + 1;
        }
        const int64_t late_row = late_rows[length], first = s->first_wait[late_row], last = s->first_wait[late_row + 1];
        lane = late_lanes[length++];
        if (first == last) break;
        row = s->waits_for[first];
        for (int64_t wait = first + 1; wait < last; wait++)
            if (s->end[s->waits_for[wait] * s->lanes + lane] > s->end[row * s->lanes + lane]) row = s->waits_for[wait];
    }
    return length;
}

KERNEL(critical_paths) {
    ENTER("critical_paths", "iiiiiibddlllb*l*l*l*l*l", 18);
    Step s = {
        .first_wait = INT32S(a[0]), .waits_for = INT32S(a[1]), .order = INT32S(a[2]), .first_of_group = INT32S(a[3]),
        .group_of_row = INT32S(a[4]), .rendezvous = INT32S(a[5]), .is_communication = BYTES(a[6]),
        .start = REALS(a[7]), .end = REALS(a[8]), .lanes = AXIS(a[7], 1), .apart = BYTES(a[12])[0],
    };
    const int64_t *first_lane = INT64S(a[9]), *row = INT64S(a[10]), *lane = INT64S(a[11]);
    int64_t *counts = INT64S(a[13]), *rows = INT64S(a[14]), *lanes = INT64S(a[15]);
    int64_t *late_rows = INT64S(a[16]), *late_lanes = INT64S(a[17]);
    const int64_t runs = AXIS(a[10], 0), capacity = AXIS(a[14], 0);
    int64_t length = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t run = 0; run < runs; run++) {
        s.lane_first = first_lane[run];
        s.lane_last = first_lane[run + 1];
        counts[run] = walk(&s, row[run], lane[run], capacity - length, rows + length, lanes + length, late_rows + length,
                           late_lanes + length);
        length += counts[run];
    }
    Py_END_ALLOW_THREADS
    LEAVE(PyLong_FromLongLong(length));
}
