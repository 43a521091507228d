/* Requests decoded by inference engines that batch continuously: all running requests get a token per decoding step. */
#include "kernels.h"
#include <math.h>
#include <stdlib.h>

typedef struct {
    double key;
    int64_t request;
} Entry;

typedef struct {
    Entry *entries;
    int64_t count;
} Heap; /* the smallest key first */

static void push(Heap *heap, double key, int64_t request) {
    int64_t position = heap->count++;
    for (; position > 0 && heap->entries[(position - 1) / 2].key > key; position = (position - 1) / 2) heap->entries[position] = heap->entries[(position - 1) / 2];
    heap->entries[position] = (Entry){key, request};
}

static int64_t pop(Heap *heap) {
    const int64_t first = heap->entries[0].request;
    const Entry last = heap->entries[--heap->count];
    int64_t position = 0;
    for (int64_t child; (child = 2 * position + 1) < heap->count; position = child) {
        if (child + 1 < heap->count && heap->entries[child + 1].key < heap->entries[child].key) child++;
        if (heap->entries[child].key >= last.key) break;
        heap->entries[position] = heap->entries[child];
    }
    heap->entries[position] = last;
    return first;
}

typedef struct {
    const double *arrives;
    double *tokens_left, *tool_left, *end; /* `end` of a request that has not ended stays as it was */
    double base_s, per_request_s, until;
    int64_t slots;
    Heap running, in_tool; /* by the decoding step, and by the time, of their next event */
} Engine;

/* A request whose tool is still to come decodes half of its tokens before. */
static double first_part(const Engine *e, int64_t request) {
    const double tokens = e->tokens_left[request];
    return e->tool_left[request] > 0 ? floor(tokens / 2) : tokens;
}

/* Decode the requests from `first` to `last`, which arrive in this order, until all have ended or until the time is up. */
static void decode(Engine *e, int64_t first, int64_t last) {
    double now = 0, steps = 0; /* seconds and decoding steps since the engine began */
    int64_t active = 0;
    for (;;) {
        for (; first < last && active < e->slots && e->arrives[first] <= now; active++, first++)
            push(&e->running, steps + first_part(e, first), first);
        const double step_s = e->base_s + e->per_request_s * (double)e->running.count;
        const double decoded = e->running.count ? now + (e->running.entries[0].key - steps) * step_s : INFINITY;
        const double returns = e->in_tool.count ? e->in_tool.entries[0].key : INFINITY;
        const double arrives = first < last && active < e->slots ? e->arrives[first] : INFINITY;
        const double next = fmin(fmin(decoded, returns), fmin(arrives, e->until));
        if (next == INFINITY) return;
        if (e->running.count) steps = next == decoded ? e->running.entries[0].key : steps + (next - now) / step_s;
        now = next;
        if (next == decoded) {
            const int64_t request = pop(&e->running);
            const double tool_s = e->tool_left[request];
            e->tokens_left[request] -= first_part(e, request);
            e->tool_left[request] = 0;
            if (tool_s > 0) {
                push(&e->in_tool, now + tool_s, request);
            } else {
                e->end[request] = now;
                active--;
            }
        } else if (next == returns) {
            const int64_t request = pop(&e->in_tool);
            push(&e->running, steps + e->tokens_left[request], request);
        } else if (next != arrives) {
            break;
        }
    }
    for (int64_t position = 0; position < e->running.count; position++) {
        const Entry entry = e->running.entries[position];
        e->tokens_left[entry.request] += entry.key - steps - first_part(e, entry.request);
    }
    for (int64_t position = 0; position < e->in_tool.count; position++)
        e->tool_left[e->in_tool.entries[position].request] = e->in_tool.entries[position].key - now;
}

KERNEL(roll_out) {
    ENTER("roll_out", "ldddnrd*d*d*", 9);
    const int64_t *first = INT64S(a[0]);
    const double *base_s = REALS(a[2]), *per_request_s = REALS(a[3]);
    Engine e = {
        .arrives = REALS(a[1]), .slots = a[4].integer, .until = a[5].real,
        .tokens_left = REALS(a[6]), .tool_left = REALS(a[7]), .end = REALS(a[8]),
    };
    const int64_t engines = AXIS(a[2], 0);
    int64_t most = 1;
    for (int64_t i = 0; i < engines; i++)
        if (first[i + 1] - first[i] > most) most = first[i + 1] - first[i];
    Entry *entries = malloc(2 * (size_t)most * sizeof(Entry));
    if (!entries) LEAVE(PyErr_NoMemory());
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < engines; i++) {
        e.base_s = base_s[i];
        e.per_request_s = per_request_s[i];
        e.running = (Heap){entries, 0};
        e.in_tool = (Heap){entries + most, 0};
        decode(&e, first[i], first[i + 1]);
    }
    Py_END_ALLOW_THREADS
    free(entries);
    LEAVE(Py_NewRef(Py_None));
}
