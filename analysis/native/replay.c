/* When would every op have run with these durations? */
#include "kernels.h"

typedef struct {
    const int32_t *order, *first_of_group, *first_wait, *waits_for, *buffer, *rendezvous;
    const uint8_t *is_communication;
    const double *matrix, *constant, *delay, *changed_delay, *changed, *begin;
    const int64_t *matrix_row, *delay_row;
    int64_t matrix_rows, matrix_lanes, delay_rows, delay_lanes, changed_delay_lanes;
    int64_t finishing, first_new, last_new;
    const int64_t *first_lane, *steps;
    int64_t runs; /* runs of lanes, each of one step */
    double *rendezvous_start;
    int64_t rendezvous_count, rendezvous_steps;
    double *live, *ends, *starts_out, *ends_out;
    int64_t out_lanes; /* 0: no timeline is wanted */
    const double *zeros; /* zeros, one per lane */
    const int32_t *choice; /* NULL: costs are those of `matrix_row` */
    const double *chosen;
    int64_t choice_lanes, first_choice;
    double *choice_costs; /* of two rows */
} Replay;

static inline __attribute__((always_inline)) void copy(double *restrict target, const double *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = from[i];
}

static inline __attribute__((always_inline)) void raise_to(double *restrict target, const double *restrict other, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = other[i] > target[i] ? other[i] : target[i];
}

static inline __attribute__((always_inline)) void latest_of(double *restrict target, const double *restrict one, const double *restrict other, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = other[i] > one[i] ? other[i] : one[i];
}

static inline __attribute__((always_inline)) void add(double *restrict target, const double *restrict other, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] += other[i];
}

static inline __attribute__((always_inline)) void end_after(double *restrict end, double *restrict last, const double *restrict cost, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const double value = end[i] + cost[i];
        end[i] = value;
        last[i] = value > last[i] ? value : last[i];
    }
}

static inline __attribute__((always_inline)) void fill(double *restrict target, double value, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = value;
}

/* The launch delay of a row in each lane from `low` on; NULL: it has none. */
static inline __attribute__((always_inline)) const double *delay_of(const Replay *r, int64_t row, int64_t low) {
    const int64_t source = r->delay_row[row];
    if (source < 0) return NULL;
    return low + (source < r->delay_rows ? r->delay + source * r->delay_lanes
                                         : r->changed_delay + (source - r->delay_rows) * r->changed_delay_lanes);
}

/* Write to their buffers when the rows of a group are ready. */
static inline __attribute__((always_inline)) void make_ready(const Replay *r, int64_t first, int64_t last, int64_t low, int64_t width) {
    for (int64_t position = first; position < last; position++) {
        const int64_t row = r->order[position];
        const int64_t wait_first = r->first_wait[row], wait_last = r->first_wait[row + 1];
        double *ready = r->live + r->buffer[row] * width;
        const int64_t waits = wait_last - wait_first;
        const double *one = waits ? r->live + r->buffer[r->waits_for[wait_first]] * width : NULL;
        if (!waits)
            fill(ready, r->begin[row], width);
        else if (waits == 1)
            copy(ready, one, width);
        else
            latest_of(ready, one, r->live + r->buffer[r->waits_for[wait_first + 1]] * width, width);
        for (int64_t wait = wait_first + 2; wait < wait_last; wait++)
            raise_to(ready, r->live + r->buffer[r->waits_for[wait]] * width, width);
        const double *delay = delay_of(r, row, low);
        if (delay) add(ready, delay, width);
        if (r->out_lanes) copy(r->starts_out + row * r->out_lanes + low, ready, width);
    }
}

/*
 * Give all lanes of a step the time of the latest. If lanes of other templates take part, only update
 * `rendezvous_start`.
 */
static inline __attribute__((always_inline)) void meet(const Replay *r, int64_t group, double *latest, int64_t low) {
    for (int64_t run = 0; run < r->runs; run++) {
        const int64_t begin = r->first_lane[run] - low, end = r->first_lane[run + 1] - low;
        double top = latest[begin];
        for (int64_t i = begin + 1; i < end; i++) top = latest[i] > top ? latest[i] : top;
        if (r->rendezvous_count) {
            double *start = r->rendezvous_start + r->rendezvous[group] * r->rendezvous_steps + r->steps[run];
            *start = top > *start ? top : *start;
        } else {
            fill(latest + begin, top, end - begin);
        }
    }
}

/* The costs of a row where several choices replay side by side, [choices x lanes of the matrix]. */
static inline __attribute__((always_inline)) const double *choice_costs(const Replay *r, int64_t row, double *costs, int64_t width) {
    const int64_t lanes = r->matrix_lanes;
    const double *usual = r->matrix + row * lanes, *chosen = r->chosen + row * lanes;
    const int32_t *choice = r->choice + row * r->choice_lanes;
    if (lanes == 1)
        fill(costs, *usual, width);
    else
        for (int64_t position = 0; position < width; position += lanes) copy(costs + position, usual, lanes);
    for (int64_t lane = 0; lane < lanes; lane++) {
        const int64_t position = (choice[r->choice_lanes > 1 ? lane : 0] - r->first_choice) * lanes + lane;
        if (position >= 0 && position < width) costs[position] = chosen[lane];
    }
    return costs;
}

/* The cost of a row in each lane from `low` on; NULL: that of `constant`. `costs`: room for choices. */
static inline __attribute__((always_inline)) const double *costs_of(const Replay *r, int64_t row, double *costs, int64_t low, int64_t width) {
    if (r->choice) return choice_costs(r, row, costs, width);
    const int64_t source = r->matrix_row[row];
    if (source < 0) return NULL;
    return low + (source < r->matrix_rows ? r->matrix + source * r->matrix_lanes
                                          : r->changed + (source - r->matrix_rows) * r->matrix_lanes);
}

/* What a row replayed in a single loop reads: two rows it waits for (possibly the same one twice), delay and cost. */
typedef struct {
    const double *one, *other, *delay, *cost;
    double fixed; /* the cost in all lanes if `cost` is NULL */
    double *end;
} Row;

static inline __attribute__((always_inline)) Row row_of(const Replay *r, int64_t row, double *costs, int64_t low, int64_t width) {
    const int64_t first = r->first_wait[row], waits = r->first_wait[row + 1] - first;
    Row inputs = {.fixed = r->constant[row], .end = r->live + r->buffer[row] * width, .one = r->zeros, .other = r->zeros};
    if (waits) {
        inputs.one = r->live + r->buffer[r->waits_for[first]] * width;
        inputs.other = waits == 1 ? inputs.one : r->live + r->buffer[r->waits_for[first + 1]] * width;
    }
    if (!waits && r->begin[row] != 0.0) {
        fill(inputs.end, r->begin[row], width);
        inputs.one = inputs.other = inputs.end;
    }
    if (waits > 2) {
        latest_of(inputs.end, inputs.one, inputs.other, width);
        for (int64_t wait = first + 2; wait < first + waits; wait++)
            raise_to(inputs.end, r->live + r->buffer[r->waits_for[wait]] * width, width);
        inputs.one = inputs.other = inputs.end;
    }
    inputs.delay = delay_of(r, row, low);
    inputs.cost = costs_of(r, row, costs, low, width);
    return inputs;
}

static inline __attribute__((always_inline)) double later(double one, double other) { return other > one ? other : one; }

/* Replay a row that starts on its own. Every lane reads and writes only values of its own. */
static inline __attribute__((always_inline)) void one_loop(Row a, double *final, int64_t width, int delayed, int fixed) {
#pragma GCC ivdep
    for (int64_t i = 0; i < width; i++) {
        double ready = later(a.one[i], a.other[i]);
        if (delayed) ready += a.delay[i];
        const double end = ready + (fixed ? a.fixed : a.cost[i]);
        a.end[i] = end;
        final[i] = later(final[i], end);
    }
}

/* Replay two rows that start together once both are ready, such as a send and its receive. */
static inline __attribute__((always_inline)) void two_loop(Row a, Row b, double *final, int64_t width, int delayed, int fixed) {
#pragma GCC ivdep
    for (int64_t i = 0; i < width; i++) {
        double ready = later(a.one[i], a.other[i]), second = later(b.one[i], b.other[i]);
        if (delayed) {
            ready += a.delay[i];
            second += b.delay[i];
        }
        ready = later(ready, second);
        const double end = ready + (fixed ? a.fixed : a.cost[i]), second_end = ready + (fixed ? b.fixed : b.cost[i]);
        a.end[i] = end;
        b.end[i] = second_end;
        final[i] = later(later(final[i], end), second_end);
    }
}

static inline __attribute__((always_inline)) void replay_one(const Replay *r, int64_t row, double *final, int64_t low, int64_t width) {
    const Row a = row_of(r, row, r->choice_costs, low, width);
    if (a.delay)
        a.cost ? one_loop(a, final, width, 1, 0) : one_loop(a, final, width, 1, 1);
    else
        a.cost ? one_loop(a, final, width, 0, 0) : one_loop(a, final, width, 0, 1);
}

/* `scratch`: [width]. */
static inline __attribute__((always_inline)) void replay_two(const Replay *r, const int32_t *rows, double *final, double *scratch, int64_t low, int64_t width) {
    Row a = row_of(r, rows[0], r->choice_costs, low, width);
    Row b = row_of(r, rows[1], r->choice_costs + width, low, width);
    const int delayed = a.delay || b.delay, fixed = !a.cost && !b.cost;
    if (!a.delay) a.delay = r->zeros;
    if (!b.delay) b.delay = r->zeros;
    if (!fixed && !(a.cost && b.cost)) {
        fill(scratch, a.cost ? b.fixed : a.fixed, width);
        if (a.cost)
            b.cost = scratch;
        else
            a.cost = scratch;
    }
    if (delayed)
        fixed ? two_loop(a, b, final, width, 1, 1) : two_loop(a, b, final, width, 1, 0);
    else
        fixed ? two_loop(a, b, final, width, 0, 1) : two_loop(a, b, final, width, 0, 0);
}

static inline __attribute__((always_inline)) void run(const Replay *r, double *latest, int64_t low, int64_t width) {
    double *restrict final = r->ends + low;
    for (int64_t group = r->finishing; group < r->last_new; group++) {
        const int64_t first = r->first_of_group[group], last = r->first_of_group[group + 1];
        const int meets = r->rendezvous[group] >= 0;
        const int together = r->is_communication[r->order[first]] && (meets || last - first > 1);
        if (!r->out_lanes && !meets && (last - first == 1 || (together && last - first == 2))) {
            if (together)
                replay_two(r, r->order + first, final, latest, low, width);
            else
                replay_one(r, r->order[first], final, low, width);
            continue;
        }
        if (group >= r->first_new) {
            make_ready(r, first, last, low, width);
            if (together) {
                copy(latest, r->live + r->buffer[r->order[first]] * width, width);
                for (int64_t position = first + 1; position < last; position++)
                    raise_to(latest, r->live + r->buffer[r->order[position]] * width, width);
                if (meets) {
                    meet(r, group, latest, low);
                    if (r->rendezvous_count) continue;
                }
            }
        }
        if (together) {
            if (meets && r->rendezvous_count)
                for (int64_t run = 0; run < r->runs; run++)
                    fill(latest + r->first_lane[run] - low,
                         r->rendezvous_start[r->rendezvous[group] * r->rendezvous_steps + r->steps[run]],
                         r->first_lane[run + 1] - r->first_lane[run]);
            for (int64_t position = first; position < last; position++) copy(r->live + r->buffer[r->order[position]] * width, latest, width);
        }
        for (int64_t position = first; position < last; position++) {
            const int64_t row = r->order[position];
            double *restrict end = r->live + r->buffer[row] * width;
            const double *costs = costs_of(r, row, r->choice_costs, low, width);
            if (costs) {
                end_after(end, final, costs, width);
            } else {
                const double fixed = r->constant[row];
                for (int64_t i = 0; i < width; i++) {
                    end[i] += fixed;
                    final[i] = end[i] > final[i] ? end[i] : final[i];
                }
            }
            if (r->out_lanes) copy(r->ends_out + row * r->out_lanes + low, end, width);
        }
    }
}

WIDE static void run_any(const Replay *r, double *latest, int64_t low, int64_t width) { run(r, latest, low, width); }

/* With a constant width, the compiler unrolls the loops. A graph with one lane is replayed so, or with 16 scenarios. */
WIDE static void run_1(const Replay *r, double *latest, int64_t low) { run(r, latest, low, 1); }
WIDE static void run_16(const Replay *r, double *latest, int64_t low) { run(r, latest, low, 16); }

KERNEL(replay) {
    ENTER("replay", "iiiiiibdlddlnnnll*d*d*d*d*dddidnd", 28);
    Replay r = {
        .order = INT32S(a[0]), .first_of_group = INT32S(a[1]), .first_wait = INT32S(a[2]), .waits_for = INT32S(a[3]),
        .buffer = INT32S(a[4]), .rendezvous = INT32S(a[5]), .is_communication = BYTES(a[6]),
        .matrix = REALS(a[7]), .matrix_row = INT64S(a[8]), .constant = REALS(a[9]),
        .delay = REALS(a[10]), .delay_row = INT64S(a[11]),
        .changed = REALS(a[22]), .begin = REALS(a[23]), .matrix_rows = AXIS(a[7], 0), .matrix_lanes = AXIS(a[7], 1),
        .delay_rows = AXIS(a[10], 0), .delay_lanes = AXIS(a[10], 1),
        .changed_delay = REALS(a[27]), .changed_delay_lanes = AXIS(a[27], 1),
        .finishing = a[12].integer, .first_new = a[13].integer, .last_new = a[14].integer,
        .first_lane = INT64S(a[15]), .runs = AXIS(a[15], 0) - 1, .steps = INT64S(a[16]),
        .rendezvous_start = REALS(a[17]), .rendezvous_count = AXIS(a[17], 0), .rendezvous_steps = AXIS(a[17], 1),
        .live = REALS(a[18]), .ends = REALS(a[19]), .starts_out = REALS(a[20]), .ends_out = REALS(a[21]),
        .out_lanes = AXIS(a[21], 0) ? AXIS(a[21], 1) : 0,
        .choice = AXIS(a[24], 0) ? INT32S(a[24]) : NULL, .choice_lanes = AXIS(a[24], 1), .chosen = REALS(a[25]),
        .first_choice = a[26].integer,
    };
    const int64_t low = r.first_lane[0], width = r.first_lane[r.runs] - low;
    double *latest = PyMem_Calloc((size_t)(4 * width + 1), sizeof *latest);
    if (!latest) LEAVE(PyErr_NoMemory());
    r.zeros = latest + width;
    r.choice_costs = latest + 2 * width;
    Py_BEGIN_ALLOW_THREADS
    if (width == 16)
        run_16(&r, latest, low);
    else if (width == 1)
        run_1(&r, latest, low);
    else
        run_any(&r, latest, low, width);
    Py_END_ALLOW_THREADS
    PyMem_Free(latest);
    LEAVE(Py_NewRef(Py_None));
}
