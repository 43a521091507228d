/* Scans the events of a Chrome-format JSON text into rows of numbers, without creating an object for each event. */
#include "arguments.h"

#include <math.h>
#include <string.h>

/* The columns of a row. A text is stored as its hash and its position; a missing number is NONE. */
enum {
    CATEGORY, ODD, PID, TID, NAME, NAME_BEGIN, NAME_END, CORRELATION, DEVICE, STREAM,
    SHAPE, FIRST_BEGIN, FIRST_END, SECOND_BEGIN, SECOND_END, SIZE, BEGIN, END, COLUMNS
};
enum { TS, DUR, TIMES };
/* Why the scan stopped. */
enum { INCOMPLETE, AT_END, DAMAGED, FULL };
#define NONE (-1)
#define DEEPEST 64

typedef struct {
    const uint8_t *text, *end;
    const char *categories; /* lower-case names, each followed by a newline */
    int64_t categories_length;
    int damaged; /* if 0, the rest is beyond the end of the text */
} Scan;

/* Where a value begins and ends. `escaped`: a string with backslashes. */
typedef struct {
    const uint8_t *begin, *end;
    int escaped;
} Value;

static const uint8_t *damaged(Scan *scan) {
    scan->damaged = 1;
    return NULL;
}

static const uint8_t *skip_space(const uint8_t *at, const uint8_t *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) at++;
    return at;
}

/* Skip a string from its first character, `at`, past the closing quote. Returns NULL if it is not closed. */
static const uint8_t *skip_string(const uint8_t *at, const uint8_t *end, int *escaped) {
    for (;;) {
        while (at < end && *at != '"' && *at != '\\') at++;
        if (at >= end) return NULL;
        if (*at == '"') return at + 1;
        *escaped = 1;
        at += 2;
    }
}

/* Return whether a character can follow a value. */
static int ends_value(uint8_t one) {
    return one == ',' || one == '}' || one == ']' || one == ':' || one == ' ' || one == '\n' || one == '\r' || one == '\t';
}

/* Skip a value. Brackets and braces are matched; what is inside is not parsed. */
static const uint8_t *skip_value(Scan *scan, const uint8_t *at, Value *value) {
    int depth = 0, escaped = 0;
    char open[DEEPEST];
    const uint8_t *end = scan->end, *first = at;
    value->begin = at;
    while (at < end) {
        switch (*at) {
        case '"':
            if (!(at = skip_string(at + 1, end, &escaped)) || at == end) return NULL;
            if (!ends_value(*at)) return damaged(scan);
            break;
        case '{':
        case '[':
            if (depth == DEEPEST) return damaged(scan);
            open[depth++] = *at++ == '{' ? '}' : ']';
            continue;
        case '}':
        case ']':
            if (!depth || open[--depth] != *at) return damaged(scan);
            at++;
            break;
        default:
            /* Numbers, true, false, null, and what separates values. */
            while (at < end && *at != '"' && *at != '}' && *at != ']' && *at != '{' && *at != '[' &&
                   (depth || !ends_value(*at)))
                at++;
        }
        if (!depth) {
            if (at == first) return damaged(scan);
            if (at == end && *first != '{' && *first != '[') return NULL;
            value->end = at;
            value->escaped = escaped;
            return at;
        }
    }
    return NULL;
}

/* Find the next key of an object. At the end of the object, key->begin is NULL. */
static const uint8_t *next_key(Scan *scan, const uint8_t *at, int first, Value *key) {
    at = skip_space(at, scan->end);
    if (at < scan->end && *at == '}') {
        key->begin = NULL;
        return at + 1;
    }
    if (!first) {
        if (at < scan->end && *at != ',') return damaged(scan);
        at = skip_space(at + 1, scan->end);
    }
    if (at >= scan->end) return NULL;
    if (*at != '"') return damaged(scan);
    key->begin = at + 1;
    int escaped = 0;
    if (!(at = skip_string(at + 1, scan->end, &escaped))) return NULL;
    key->end = at - 1;
    at = skip_space(at, scan->end);
    if (at >= scan->end) return NULL;
    if (*at != ':') return damaged(scan);
    at = skip_space(at + 1, scan->end);
    return at < scan->end ? at : NULL;
}

static int is(const Value *value, const char *text) {
    size_t length = strlen(text);
    return (size_t)(value->end - value->begin) == length && memcmp(value->begin, text, length) == 0;
}

static int64_t hash(const uint8_t *at, const uint8_t *end) {
    uint64_t found = 0x9E3779B97F4A7C15ull ^ (uint64_t)(end - at);
    for (; at < end; at += 8) {
        uint64_t word = 0;
        memcpy(&word, at, (size_t)(end - at < 8 ? end - at : 8));
        found = (found ^ word) * 0xFF51AFD7ED558CCDull;
        found ^= found >> 32;
    }
    return (int64_t)found;
}

/* Parse an integer of at most 18 digits. Returns 0 if the value is not one. */
static int whole(const Value *value, int64_t *out) {
    const uint8_t *at = value->begin;
    int negative = *at == '-';
    at += negative;
    if (value->end - at < 1 || value->end - at > 18) return 0;
    int64_t found = 0;
    for (; at < value->end; at++) {
        if (*at < '0' || *at > '9') return 0;
        found = found * 10 + (*at - '0');
    }
    *out = negative ? -found : found;
    return 1;
}

/*
 * Parse a number as Python does. Returns 0 if the value is not one. Digits of at most 2^53 over a power of ten, both of
 * which a double holds, give the nearest double by one division; all others are for Python.
 */
static int number(const Value *value, double *out) {
    static const double powers[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16};
    char copy[64];
    const uint8_t *at = value->begin + (*value->begin == '-'), *point = NULL;
    int64_t digits = 0;
    for (; at < value->end && digits <= INT64_C(1) << 53; at++) {
        if (*at >= '0' && *at <= '9') digits = digits * 10 + (*at - '0');
        else if (*at == '.' && !point && at > value->begin && at[-1] != '-') point = at;
        else break;
    }
    const int64_t places = point ? value->end - point - 1 : 0;
    if (at == value->end && at[-1] != '-' && digits <= INT64_C(1) << 53 && places <= 16) {
        *out = (double)digits / powers[places];
        if (*value->begin == '-') *out = -*out;
        return 1;
    }
    const uint8_t first = *value->begin;
    const size_t length = (size_t)(value->end - value->begin);
    if (length >= sizeof copy || (first != '-' && (first < '0' || first > '9'))) return 0;
    memcpy(copy, value->begin, length);
    copy[length] = '\0';
    *out = PyOS_string_to_double(copy, NULL, NULL);
    if (*out == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* The number of a category, NONE if it is not kept. Traces of 2021 capitalise categories. */
static int64_t category(const Scan *scan, const Value *value) {
    uint8_t name[32] = {0};
    size_t length = (size_t)(value->end - value->begin);
    if (length >= sizeof name) return NONE;
    for (size_t i = 0; i < length; i++) {
        uint8_t letter = value->begin[i];
        name[i] = letter >= 'A' && letter <= 'Z' ? letter + 32 : letter;
    }
    const char *at = scan->categories, *end = at + scan->categories_length;
    for (int64_t found = 0; at < end; found++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        if (!stop) break;
        if ((size_t)(stop - at) == length && memcmp(at, name, length) == 0) return found;
        at = stop + 1;
    }
    return NONE;
}

static int is_null(const Value *value) { return is(value, "null"); }

static void take_whole(const Value *value, int64_t *row, int column) {
    if (!whole(value, &row[column]) && !is_null(value)) row[ODD] = 1;
}

static void take_span(const Scan *scan, const Value *value, int64_t *row, int begin, int end) {
    row[begin] = value->begin - scan->text;
    row[end] = value->end - scan->text;
    row[SHAPE] = (row[SHAPE] == NONE ? 0 : row[SHAPE] * 31) + hash(value->begin, value->end);
}

/* Parse the arguments of an event. */
static const uint8_t *take_arguments(Scan *scan, const uint8_t *at, int64_t *row) {
    Value key, value;
    for (int first = 1;; first = 0) {
        if (!(at = next_key(scan, at, first, &key)) || !key.begin) return at;
        if (!(at = skip_value(scan, at, &value))) return NULL;
        switch (*key.begin) {
        case 'c': if (is(&key, "correlation")) take_whole(&value, row, CORRELATION); break;
        case 'd': if (is(&key, "device")) take_whole(&value, row, DEVICE); break;
        case 'e': if (is(&key, "est. achieved occupancy %")) whole(&value, &row[SIZE]); break;
        case 's': if (is(&key, "stream")) take_whole(&value, row, STREAM); break;
        case 'g': if (is(&key, "grid")) take_span(scan, &value, row, FIRST_BEGIN, FIRST_END); break;
        case 'b':
            if (is(&key, "block")) take_span(scan, &value, row, SECOND_BEGIN, SECOND_END);
            else if (is(&key, "bytes")) whole(&value, &row[SIZE]);
            break;
        case 'I':
            if (is(&key, "Input Dims") || is(&key, "Input dims")) take_span(scan, &value, row, FIRST_BEGIN, FIRST_END);
            else if (is(&key, "Input type")) take_span(scan, &value, row, SECOND_BEGIN, SECOND_END);
            break;
        case 'C': if (is(&key, "Collective name")) row[ODD] = 1; break;
        case 'P': if (is(&key, "Process Group Name")) row[ODD] = 1; break;
        default: break;
        }
    }
}

/* Parse an event from behind its opening brace. Returns where it ends, or NULL. `kept`: whether it is wanted. */
static const uint8_t *take_event(Scan *scan, const uint8_t *at, int64_t *row, double *times, int *kept) {
    Value key, value;
    int complete = 0, instant = 0;
    for (int i = 0; i < COLUMNS; i++) row[i] = NONE;
    row[ODD] = 0;
    times[TS] = Py_NAN;
    times[DUR] = Py_NAN;
    for (int first = 1;; first = 0) {
        if (!(at = next_key(scan, at, first, &key))) return NULL;
        if (!key.begin) break;
        if (is(&key, "args") && *at == '{') {
            if (!(at = take_arguments(scan, at + 1, row))) return NULL;
            continue;
        }
        if (!(at = skip_value(scan, at, &value))) return NULL;
        Value inside = {value.begin + 1, value.end - 1, value.escaped};
        if (is(&key, "ph")) complete = is(&value, "\"X\""), instant = is(&value, "\"i\"");
        else if (is(&key, "cat")) row[CATEGORY] = *value.begin == '"' ? category(scan, &inside) : NONE;
        else if (is(&key, "name")) {
            if (*value.begin != '"' || value.escaped) row[ODD] = 1;
            row[NAME_BEGIN] = inside.begin - scan->text;
            row[NAME_END] = inside.end - scan->text;
            if (!row[ODD]) row[NAME] = hash(inside.begin, inside.end);
        } else if (is(&key, "pid")) take_whole(&value, row, PID);
        else if (is(&key, "tid")) take_whole(&value, row, TID);
        else if (is(&key, "ts")) row[ODD] |= !number(&value, &times[TS]) && !is_null(&value);
        else if (is(&key, "dur")) row[ODD] |= !number(&value, &times[DUR]) && !is_null(&value);
        else if (is(&key, "args")) row[ODD] |= !is_null(&value);
    }
    const Value name = {scan->text + row[NAME_BEGIN], scan->text + row[NAME_END], 0};
    if (instant && row[CATEGORY] != NONE && row[NAME_BEGIN] != NONE && is(&name, "[memory]")) complete = row[ODD] = 1;
    *kept = complete && row[CATEGORY] != NONE;
    return at;
}

/*
 * scan_events(text, begin, categories, rows, times) -> (rows filled, where it stopped, why)
 *
 * `begin` is before an event, a comma or the end of the list. The scan stops before what it cannot parse.
 */
static KERNEL(scan_events) {
    ENTER("scan_events", "BnB*l*d", 5);
    Scan scan = {BYTES(a[0]), BYTES(a[0]) + AXIS(a[0], 0), (const char *)BYTES(a[2]), AXIS(a[2], 0), 0};
    const int64_t most = AXIS(a[3], 1);
    int64_t row[COLUMNS], *rows = INT64S(a[3]), filled = 0;
    double time[TIMES], *times = REALS(a[4]);
    const uint8_t *at = scan.text + a[1].integer, *stopped = at;
    int why = INCOMPLETE, kept = 0;
    if (AXIS(a[3], 0) != COLUMNS || AXIS(a[4], 0) != TIMES || AXIS(a[4], 1) != most) {
        PyErr_SetString(PyExc_TypeError, "scan_events: rows and times of the wrong shape");
        LEAVE(NULL);
    }
    for (;;) {
        at = skip_space(at, scan.end);
        if (at < scan.end && *at == ',') at = skip_space(at + 1, scan.end);
        stopped = at;
        if (at == scan.end) break;
        if (*at == ']') {
            stopped = at + 1;
            why = AT_END;
            break;
        }
        if (filled == most) {
            why = FULL;
            break;
        }
        if (*at != '{') {
            why = DAMAGED;
            break;
        }
        at = take_event(&scan, at + 1, row, time, &kept);
        if (!at) {
            why = scan.damaged ? DAMAGED : INCOMPLETE;
            break;
        }
        if (kept) {
            row[BEGIN] = stopped - scan.text;
            row[END] = at - scan.text;
            for (int i = 0; i < COLUMNS; i++) rows[i * most + filled] = row[i];
            for (int i = 0; i < TIMES; i++) times[i * most + filled] = time[i];
            filled++;
        }
    }
    LEAVE(Py_BuildValue("LLi", (long long)filled, (long long)(stopped - scan.text), why));
}

/* What a span is, and what the innermost spans around it are: positions of texts, NONE for none. */
enum { CALL = 1, OPERATOR = 2, PYTHON = 4, NOTE = 8, COLLECTS = 16, LOADER = 32, MODULE = 64, OWN = 128, SAVES = 256 };
/* Of what a thread does. `reason`: numbers of IdleReason, as far as threads cause them. `busy`: 1, and 2 in an operator
 * that launches. */
enum { REASON_LOADER, REASON_GC, REASON_OPERATOR = 5, REASON_PYTHON, REASON_CHECKPOINT = 11 };
typedef struct {
    int32_t reason, name, called, own, busy;
} What;
typedef struct {
    int64_t span;
    int32_t operator_name, inputs, python, note, loader, saves, module, own, number;
    int collects, in_call, launches;
} Open;
typedef struct {
    What *found;
    int32_t *slots; /* positions in `found`, NONE where free */
    int64_t count, size; /* size: of the slots, a power of two; there is room for half as many */
} Whats;

/* The number of what a thread does, a new one if nothing did it before. Returns NONE if there is no memory. */
static int32_t number_of(Whats *whats, const What *what) {
    if (2 * whats->count >= whats->size) {
        const int64_t size = whats->size ? 2 * whats->size : 1024;
        What *found = PyMem_Realloc(whats->found, sizeof *found * (size_t)size / 2);
        if (!found) return NONE;
        whats->found = found;
        int32_t *slots = PyMem_Realloc(whats->slots, sizeof *slots * (size_t)size);
        if (!slots) return NONE;
        whats->slots = slots;
        whats->size = size;
        memset(slots, 0xFF, sizeof *slots * (size_t)size);
        for (int64_t i = 0; i < whats->count; i++) {
            uint64_t at = (uint64_t)hash((const uint8_t *)&found[i], (const uint8_t *)(&found[i] + 1));
            while (slots[at & (uint64_t)(size - 1)] != NONE) at++;
            slots[at & (uint64_t)(size - 1)] = (int32_t)i;
        }
    }
    uint64_t at = (uint64_t)hash((const uint8_t *)what, (const uint8_t *)(what + 1));
    for (;; at++) {
        int32_t *slot = &whats->slots[at & (uint64_t)(whats->size - 1)];
        if (*slot == NONE) {
            whats->found[whats->count] = *what;
            *slot = (int32_t)whats->count++;
            return *slot;
        }
        if (memcmp(&whats->found[*slot], what, sizeof *what) == 0) return *slot;
    }
}

/* What a thread does while the last of the open spans is its innermost one. */
static What what_in(const Open *open, int is_call, int32_t name, int32_t reason_of_call) {
    int busy = open->operator_name != NONE || open->in_call;
    What what = {REASON_PYTHON, open->note, NONE, open->own, busy | open->launches << 1};
    if (open->python != NONE) what.name = open->python;
    if (open->operator_name != NONE) what.name = open->operator_name;
    if (open->operator_name != NONE) what.reason = REASON_OPERATOR;
    if (is_call) {
        what.reason = reason_of_call;
        what.name = open->operator_name;
        what.called = name;
    }
    if (open->collects) what = (What){REASON_GC, NONE, NONE, open->own, what.busy};
    if (open->saves != NONE) what = (What){REASON_CHECKPOINT, open->saves, NONE, open->own, what.busy};
    if (open->loader != NONE) what = (What){REASON_LOADER, open->loader, NONE, open->own, what.busy};
    return what;
}

/*
 * nest_spans(lane, begin, end, name, inputs, flags, reason_of_call, begun, ended, what, where, around, parent) -> (pieces, whats)
 *
 * Spans of lanes, which lie inside each other; in order of lane, begin, and end, the latest first. The pieces are when
 * lanes did one thing, at most two a span; `where`: their lanes; `whats`: the distinct things, five int32 each.
 * around[:, c]: of the call number c the innermost operator, its inputs, module, own line. Of operators, reason_of_call
 * is whether they launch. `parent`: the innermost span around each span, NONE for none. Spans that overlap otherwise: the outer ones last until the inner one ends, unless that is a
 * matter of rounding.
 */
#define ROUNDING 2.0
static KERNEL(nest_spans) {
    ENTER("nest_spans", "id*diiiB*d*d*i*i*i*i", 13);
    const int64_t spans = AXIS(a[0], 0), calls = AXIS(a[11], 1);
    const int32_t *lane = INT32S(a[0]), *name = INT32S(a[3]), *inputs = INT32S(a[4]);
    const int32_t *flags = INT32S(a[5]);
    const uint8_t *reason_of_call = BYTES(a[6]);
    const double *begin = REALS(a[1]);
    double *end = REALS(a[2]), *begun = REALS(a[7]), *ended = REALS(a[8]), at = 0.0;
    int32_t *what = INT32S(a[9]), *where = INT32S(a[10]), *around = INT32S(a[11]), *parent = INT32S(a[12]);
    int64_t pieces = 0, depth = 0, room = 256, call = 0;
    Whats whats = {NULL, NULL, 0, 0};
    Open *open = PyMem_Malloc(sizeof *open * (size_t)room);
    PyObject *result = NULL;
    if (!open) goto done;
    for (int64_t i = 0; i <= spans; i++) {
        const int new_lane = i == spans || (i && lane[i] != lane[i - 1]);
        /* Until span i begins, or until the last one of the lane before has ended. */
        for (;;) {
            const double limit = i < spans && !new_lane ? begin[i] : INFINITY;
            if (!depth) break;
            const Open *inner = &open[depth - 1];
            const double until = end[inner->span] < limit ? end[inner->span] : limit;
            if (until > at) {
                const int32_t here = lane[inner->span];
                if (pieces && what[pieces - 1] == inner->number && ended[pieces - 1] == at && where[pieces - 1] == here) {
                    ended[pieces - 1] = until;
                } else {
                    begun[pieces] = at;
                    ended[pieces] = until;
                    where[pieces] = here;
                    what[pieces++] = inner->number;
                }
                at = until;
            }
            if (end[inner->span] > limit) break;
            depth--;
        }
        if (i == spans) break;
        at = begin[i];
        if (depth + 1 >= room) {
            Open *more = PyMem_Realloc(open, sizeof *open * (size_t)(room *= 2));
            if (!more) goto done;
            open = more;
        }
        Open *one = &open[depth];
        *one = depth ? open[depth - 1] : (Open){i, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0, 0, 0};
        one->span = i;
        parent[i] = depth ? (int32_t)open[depth - 1].span : NONE;
        if (depth) {
            const double last = end[parent[i]];
            if (end[i] > last && end[i] <= last + ROUNDING) end[i] = last;
            for (int64_t k = depth - 1; k >= 0 && end[open[k].span] < end[i]; k--) end[open[k].span] = end[i];
        }
        if (flags[i] & OPERATOR) {
            one->operator_name = name[i], one->inputs = inputs[i], one->launches = reason_of_call[i];
        }
        if (flags[i] & PYTHON) one->python = name[i];
        if (flags[i] & NOTE) one->note = name[i];
        if (flags[i] & LOADER) one->loader = name[i];
        if (flags[i] & SAVES && one->saves == NONE) one->saves = name[i];
        if (flags[i] & MODULE) one->module = name[i];
        /* What writes a checkpoint was called from the line before it, whichever library it is. */
        if (flags[i] & OWN && (one->saves == NONE || one->own == NONE)) one->own = name[i];
        if (flags[i] & COLLECTS) one->collects = 1;
        if (flags[i] & CALL) {
            one->in_call = 1;
            const int32_t texts[] = {one->operator_name, one->inputs, one->module, one->own};
            for (int64_t k = 0; k < 4 && call < calls; k++) around[k * calls + call] = texts[k];
            call++;
        }
        const What now = what_in(one, flags[i] & CALL, name[i], flags[i] & CALL ? reason_of_call[i] : 0);
        if ((one->number = number_of(&whats, &now)) == NONE) goto done;
        depth++;
    }
    result = Py_BuildValue("Ly#", (long long)pieces, (const char *)whats.found, (Py_ssize_t)(sizeof(What) * (size_t)whats.count));
done:
    if (!result && !PyErr_Occurred()) PyErr_NoMemory();
    PyMem_Free(whats.found);
    PyMem_Free(whats.slots);
    PyMem_Free(open);
    LEAVE(result);
}

static PyMethodDef methods[] = {
    {"nest_spans", (PyCFunction)(void (*)(void))nest_spans, METH_FASTCALL, NULL},
    {"scan_events", (PyCFunction)(void (*)(void))scan_events, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_events", .m_doc = NULL, .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__events(void) { return PyModule_Create(&definition); }
