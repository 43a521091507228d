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

static const uint8_t *skip_space(const uint8_t *cursor, const uint8_t *end) {
    while (cursor < end && (*cursor == ' ' || *cursor == '\n' || *cursor == '\t' || *cursor == '\r')) cursor++;
    return cursor;
}

/* Skip a string from its first character, `cursor`, past the closing quote. Returns NULL if it is not closed. */
static const uint8_t *skip_string(const uint8_t *cursor, const uint8_t *end, int *escaped) {
    for (;;) {
        while (cursor < end && *cursor != '"' && *cursor != '\\') cursor++;
        if (cursor >= end) return NULL;
        if (*cursor == '"') return cursor + 1;
        *escaped = 1;
        cursor += 2;
    }
}

/* Return whether a character can follow a value. */
static int ends_value(uint8_t byte) {
    return byte == ',' || byte == '}' || byte == ']' || byte == ':' || byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t';
}

/* Skip a value. Brackets and braces are matched; what is inside is not parsed. */
static const uint8_t *skip_value(Scan *scan, const uint8_t *cursor, Value *value) {
    int depth = 0, escaped = 0;
    char open[DEEPEST];
    const uint8_t *end = scan->end, *first = cursor;
    value->begin = cursor;
    while (cursor < end) {
        switch (*cursor) {
        case '"':
            if (!(cursor = skip_string(cursor + 1, end, &escaped)) || cursor == end) return NULL;
            if (!ends_value(*cursor)) return damaged(scan);
            break;
        case '{':
        case '[':
            if (depth == DEEPEST) return damaged(scan);
            open[depth++] = *cursor++ == '{' ? '}' : ']';
            continue;
        case '}':
        case ']':
            if (!depth || open[--depth] != *cursor) return damaged(scan);
            cursor++;
            break;
        default:
            /* Numbers, true, false, null, and what separates values. */
            while (cursor < end && *cursor != '"' && *cursor != '}' && *cursor != ']' && *cursor != '{' && *cursor != '[' &&
                   (depth || !ends_value(*cursor)))
                cursor++;
        }
        if (!depth) {
            if (cursor == first) return damaged(scan);
            if (cursor == end && *first != '{' && *first != '[') return NULL;
            value->end = cursor;
            value->escaped = escaped;
            return cursor;
        }
    }
    return NULL;
}

/* Find the next key of an object. At the end of the object, key->begin is NULL. */
static const uint8_t *next_key(Scan *scan, const uint8_t *cursor, int first, Value *key) {
    cursor = skip_space(cursor, scan->end);
    if (cursor < scan->end && *cursor == '}') {
        key->begin = NULL;
        return cursor + 1;
    }
    if (!first) {
        if (cursor < scan->end && *cursor != ',') return damaged(scan);
        cursor = skip_space(cursor + 1, scan->end);
    }
    if (cursor >= scan->end) return NULL;
    if (*cursor != '"') return damaged(scan);
    key->begin = cursor + 1;
    int escaped = 0;
    if (!(cursor = skip_string(cursor + 1, scan->end, &escaped))) return NULL;
    key->end = cursor - 1;
    cursor = skip_space(cursor, scan->end);
    if (cursor >= scan->end) return NULL;
    if (*cursor != ':') return damaged(scan);
    cursor = skip_space(cursor + 1, scan->end);
    return cursor < scan->end ? cursor : NULL;
}

static int equals(const Value *value, const char *text) {
    size_t length = strlen(text);
    return (size_t)(value->end - value->begin) == length && memcmp(value->begin, text, length) == 0;
}

static int64_t hash(const uint8_t *cursor, const uint8_t *end) {
    uint64_t value = 0x9E3779B97F4A7C15ull ^ (uint64_t)(end - cursor);
    for (; cursor < end; cursor += 8) {
        uint64_t word = 0;
        memcpy(&word, cursor, (size_t)(end - cursor < 8 ? end - cursor : 8));
        value = (value ^ word) * 0xFF51AFD7ED558CCDull;
        value ^= value >> 32;
    }
    return (int64_t)value;
}

/* Parse an integer of at most 18 digits. Returns 0 if the value is not one. */
static int parse_whole(const Value *value, int64_t *out) {
    const uint8_t *cursor = value->begin;
    int negative = *cursor == '-';
    cursor += negative;
    if (value->end - cursor < 1 || value->end - cursor > 18) return 0;
    int64_t magnitude = 0;
    for (; cursor < value->end; cursor++) {
        if (*cursor < '0' || *cursor > '9') return 0;
        magnitude = magnitude * 10 + (*cursor - '0');
    }
    *out = negative ? -magnitude : magnitude;
    return 1;
}

/*
 * Parse a number as Python does. Returns 0 if the value is not one. Digits of at most 2^53 over a power of ten, both of
 * which a double holds, give the nearest double by one division; all others are for Python.
 */
static int number(const Value *value, double *out) {
    static const double powers[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16};
    char copy[64];
    const uint8_t *cursor = value->begin + (*value->begin == '-'), *point = NULL;
    int64_t digits = 0;
    for (; cursor < value->end && digits <= INT64_C(1) << 53; cursor++) {
        if (*cursor >= '0' && *cursor <= '9') digits = digits * 10 + (*cursor - '0');
        else if (*cursor == '.' && !point && cursor > value->begin && cursor[-1] != '-') point = cursor;
        else break;
    }
    const int64_t places = point ? value->end - point - 1 : 0;
    if (cursor == value->end && cursor[-1] != '-' && digits <= INT64_C(1) << 53 && places <= 16) {
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
    const char *cursor = scan->categories, *end = cursor + scan->categories_length;
    for (int64_t index = 0; cursor < end; index++) {
        const char *stop = memchr(cursor, '\n', (size_t)(end - cursor));
        if (!stop) break;
        if ((size_t)(stop - cursor) == length && memcmp(cursor, name, length) == 0) return index;
        cursor = stop + 1;
    }
    return NONE;
}

static int is_null(const Value *value) { return equals(value, "null"); }

static void read_whole(const Value *value, int64_t *row, int column) {
    if (!parse_whole(value, &row[column]) && !is_null(value)) row[ODD] = 1;
}

static void read_span(const Scan *scan, const Value *value, int64_t *row, int begin, int end) {
    row[begin] = value->begin - scan->text;
    row[end] = value->end - scan->text;
    row[SHAPE] = (row[SHAPE] == NONE ? 0 : row[SHAPE] * 31) + hash(value->begin, value->end);
}

/* Parse the arguments of an event. */
static const uint8_t *read_arguments(Scan *scan, const uint8_t *cursor, int64_t *row) {
    Value key, value;
    for (int first = 1;; first = 0) {
        if (!(cursor = next_key(scan, cursor, first, &key)) || !key.begin) return cursor;
        if (!(cursor = skip_value(scan, cursor, &value))) return NULL;
        switch (*key.begin) {
        case 'c': if (equals(&key, "correlation")) read_whole(&value, row, CORRELATION); break;
        case 'd': if (equals(&key, "device")) read_whole(&value, row, DEVICE); break;
        case 'e': if (equals(&key, "est. achieved occupancy %")) parse_whole(&value, &row[SIZE]); break;
        case 's': if (equals(&key, "stream")) read_whole(&value, row, STREAM); break;
        case 'g': if (equals(&key, "grid")) read_span(scan, &value, row, FIRST_BEGIN, FIRST_END); break;
        case 'b':
            if (equals(&key, "block")) read_span(scan, &value, row, SECOND_BEGIN, SECOND_END);
            else if (equals(&key, "bytes")) parse_whole(&value, &row[SIZE]);
            break;
        case 'I':
            if (equals(&key, "Input Dims") || equals(&key, "Input dims")) read_span(scan, &value, row, FIRST_BEGIN, FIRST_END);
            else if (equals(&key, "Input type")) read_span(scan, &value, row, SECOND_BEGIN, SECOND_END);
            break;
        case 'C': if (equals(&key, "Collective name")) row[ODD] = 1; break;
        case 'P': if (equals(&key, "Process Group Name")) row[ODD] = 1; break;
        default: break;
        }
    }
}

/* Parse an event from behind its opening brace. Returns where it ends, or NULL. `kept`: whether it is wanted. */
static const uint8_t *read_event(Scan *scan, const uint8_t *cursor, int64_t *row, double *times, int *kept) {
    Value key, value;
    int complete = 0, instant = 0;
    for (int i = 0; i < COLUMNS; i++) row[i] = NONE;
    row[ODD] = 0;
    times[TS] = Py_NAN;
    times[DUR] = Py_NAN;
    for (int first = 1;; first = 0) {
        if (!(cursor = next_key(scan, cursor, first, &key))) return NULL;
        if (!key.begin) break;
        if (equals(&key, "args") && *cursor == '{') {
            if (!(cursor = read_arguments(scan, cursor + 1, row))) return NULL;
            continue;
        }
        if (!(cursor = skip_value(scan, cursor, &value))) return NULL;
        Value inside = {value.begin + 1, value.end - 1, value.escaped};
        if (equals(&key, "ph")) complete = equals(&value, "\"X\""), instant = equals(&value, "\"i\"");
        else if (equals(&key, "cat")) row[CATEGORY] = *value.begin == '"' ? category(scan, &inside) : NONE;
        else if (equals(&key, "name")) {
            if (*value.begin != '"' || value.escaped) row[ODD] = 1;
            row[NAME_BEGIN] = inside.begin - scan->text;
            row[NAME_END] = inside.end - scan->text;
            if (!row[ODD]) row[NAME] = hash(inside.begin, inside.end);
        } else if (equals(&key, "pid")) read_whole(&value, row, PID);
        else if (equals(&key, "tid")) read_whole(&value, row, TID);
        else if (equals(&key, "ts")) row[ODD] |= !number(&value, &times[TS]) && !is_null(&value);
        else if (equals(&key, "dur")) row[ODD] |= !number(&value, &times[DUR]) && !is_null(&value);
        else if (equals(&key, "args")) row[ODD] |= !is_null(&value);
    }
    const Value name = {scan->text + row[NAME_BEGIN], scan->text + row[NAME_END], 0};
    if (instant && row[CATEGORY] != NONE && row[NAME_BEGIN] != NONE && equals(&name, "[memory]")) complete = row[ODD] = 1;
    *kept = complete && row[CATEGORY] != NONE;
    return cursor;
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
    const uint8_t *cursor = scan.text + a[1].integer, *stopped = cursor;
    int why = INCOMPLETE, kept = 0;
    if (AXIS(a[3], 0) != COLUMNS || AXIS(a[4], 0) != TIMES || AXIS(a[4], 1) != most) {
        PyErr_SetString(PyExc_TypeError, "scan_events: rows and times of the wrong shape");
        LEAVE(NULL);
    }
    for (;;) {
        cursor = skip_space(cursor, scan.end);
        if (cursor < scan.end && *cursor == ',') cursor = skip_space(cursor + 1, scan.end);
        stopped = cursor;
        if (cursor == scan.end) break;
        if (*cursor == ']') {
            stopped = cursor + 1;
            why = AT_END;
            break;
        }
        if (filled == most) {
            why = FULL;
            break;
        }
        if (*cursor != '{') {
            why = DAMAGED;
            break;
        }
        cursor = read_event(&scan, cursor + 1, row, time, &kept);
        if (!cursor) {
            why = scan.damaged ? DAMAGED : INCOMPLETE;
            break;
        }
        if (kept) {
            row[BEGIN] = stopped - scan.text;
            row[END] = cursor - scan.text;
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
} Activity;
typedef struct {
    int64_t span;
    int32_t operator_name, inputs, python, note, loader, saves, module, own, number;
    int collects, in_call, launches;
} Open;
typedef struct {
    Activity *items;
    int32_t *slots; /* positions in `items`, NONE where free */
    int64_t count, size; /* size: of the slots, a power of two; there is room for half as many */
} Activities;

/* The number of what a thread does, a new one if nothing did it before. Returns NONE if there is no memory. */
static int32_t number_of(Activities *activities, const Activity *activity) {
    if (2 * activities->count >= activities->size) {
        const int64_t size = activities->size ? 2 * activities->size : 1024;
        Activity *items = PyMem_Realloc(activities->items, sizeof *items * (size_t)size / 2);
        if (!items) return NONE;
        activities->items = items;
        int32_t *slots = PyMem_Realloc(activities->slots, sizeof *slots * (size_t)size);
        if (!slots) return NONE;
        activities->slots = slots;
        activities->size = size;
        memset(slots, 0xFF, sizeof *slots * (size_t)size);
        for (int64_t i = 0; i < activities->count; i++) {
            uint64_t hash_value = (uint64_t)hash((const uint8_t *)&items[i], (const uint8_t *)(&items[i] + 1));
            while (slots[hash_value & (uint64_t)(size - 1)] != NONE) hash_value++;
            slots[hash_value & (uint64_t)(size - 1)] = (int32_t)i;
        }
    }
    uint64_t hash_value = (uint64_t)hash((const uint8_t *)activity, (const uint8_t *)(activity + 1));
    for (;; hash_value++) {
        int32_t *slot = &activities->slots[hash_value & (uint64_t)(activities->size - 1)];
        if (*slot == NONE) {
            activities->items[activities->count] = *activity;
            *slot = (int32_t)activities->count++;
            return *slot;
        }
        if (memcmp(&activities->items[*slot], activity, sizeof *activity) == 0) return *slot;
    }
}

/* What a thread does while the last of the open spans is its innermost one. */
static Activity activity_in(const Open *open, int is_call, int32_t name, int32_t reason_of_call) {
    int busy = open->operator_name != NONE || open->in_call;
    Activity activity = {REASON_PYTHON, open->note, NONE, open->own, busy | open->launches << 1};
    if (open->python != NONE) activity.name = open->python;
    if (open->operator_name != NONE) activity.name = open->operator_name;
    if (open->operator_name != NONE) activity.reason = REASON_OPERATOR;
    if (is_call) {
        activity.reason = reason_of_call;
        activity.name = open->operator_name;
        activity.called = name;
    }
    if (open->collects) activity = (Activity){REASON_GC, NONE, NONE, open->own, activity.busy};
    if (open->saves != NONE) activity = (Activity){REASON_CHECKPOINT, open->saves, NONE, open->own, activity.busy};
    if (open->loader != NONE) activity = (Activity){REASON_LOADER, open->loader, NONE, open->own, activity.busy};
    return activity;
}

/*
 * nest_spans(lane, begin, end, name, inputs, flags, reason_of_call, begins, ends, activity, where, around, parent) -> (pieces, activities)
 *
 * Spans of lanes, which lie inside each other; in order of lane, begin, and end, the latest first. The pieces are when
 * lanes did one thing, at most two a span; `where`: their lanes; `activities`: the distinct things, five int32 each.
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
    double *end = REALS(a[2]), *begins = REALS(a[7]), *ends = REALS(a[8]), time = 0.0;
    int32_t *activity = INT32S(a[9]), *where = INT32S(a[10]), *around = INT32S(a[11]), *parent = INT32S(a[12]);
    int64_t pieces = 0, depth = 0, capacity = 256, call = 0;
    Activities activities = {NULL, NULL, 0, 0};
    Open *open = PyMem_Malloc(sizeof *open * (size_t)capacity);
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
            if (until > time) {
                const int32_t lane_number = lane[inner->span];
                if (pieces && activity[pieces - 1] == inner->number && ends[pieces - 1] == time && where[pieces - 1] == lane_number) {
                    ends[pieces - 1] = until;
                } else {
                    begins[pieces] = time;
                    ends[pieces] = until;
                    where[pieces] = lane_number;
                    activity[pieces++] = inner->number;
                }
                time = until;
            }
            if (end[inner->span] > limit) break;
            depth--;
        }
        if (i == spans) break;
        time = begin[i];
        if (depth + 1 >= capacity) {
            Open *grown = PyMem_Realloc(open, sizeof *open * (size_t)(capacity *= 2));
            if (!grown) goto done;
            open = grown;
        }
        Open *inner_span = &open[depth];
        *inner_span = depth ? open[depth - 1] : (Open){i, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0, 0, 0};
        inner_span->span = i;
        parent[i] = depth ? (int32_t)open[depth - 1].span : NONE;
        if (depth) {
            const double last = end[parent[i]];
            if (end[i] > last && end[i] <= last + ROUNDING) end[i] = last;
            for (int64_t k = depth - 1; k >= 0 && end[open[k].span] < end[i]; k--) end[open[k].span] = end[i];
        }
        if (flags[i] & OPERATOR) {
            inner_span->operator_name = name[i], inner_span->inputs = inputs[i], inner_span->launches = reason_of_call[i];
        }
        if (flags[i] & PYTHON) inner_span->python = name[i];
        if (flags[i] & NOTE) inner_span->note = name[i];
        if (flags[i] & LOADER) inner_span->loader = name[i];
        if (flags[i] & SAVES && inner_span->saves == NONE) inner_span->saves = name[i];
        if (flags[i] & MODULE) inner_span->module = name[i];
        /* What writes a checkpoint was called from the line before it, whichever library it is. */
        if (flags[i] & OWN && (inner_span->saves == NONE || inner_span->own == NONE)) inner_span->own = name[i];
        if (flags[i] & COLLECTS) inner_span->collects = 1;
        if (flags[i] & CALL) {
            inner_span->in_call = 1;
            const int32_t texts[] = {inner_span->operator_name, inner_span->inputs, inner_span->module, inner_span->own};
            for (int64_t k = 0; k < 4 && call < calls; k++) around[k * calls + call] = texts[k];
            call++;
        }
        const Activity now = activity_in(inner_span, flags[i] & CALL, name[i], flags[i] & CALL ? reason_of_call[i] : 0);
        if ((inner_span->number = number_of(&activities, &now)) == NONE) goto done;
        depth++;
    }
    result = Py_BuildValue("Ly#", (long long)pieces, (const char *)activities.items, (Py_ssize_t)(sizeof(Activity) * (size_t)activities.count));
done:
    if (!result && !PyErr_Occurred()) PyErr_NoMemory();
    PyMem_Free(activities.items);
    PyMem_Free(activities.slots);
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
