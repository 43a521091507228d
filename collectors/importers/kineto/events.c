/* Scans the events of a Chrome-format JSON text into rows of numbers, without creating an object for each event. */
#include "arguments.h"

#include <string.h>

/* The columns of a row. A text is stored as its hash and its position; a missing number is NONE. */
enum {
    CATEGORY, ODD, PID, TID, NAME, NAME_BEGIN, NAME_END, CORRELATION, DEVICE, STREAM,
    SHAPE, GRID_BEGIN, GRID_END, BLOCK_BEGIN, BLOCK_END, BEGIN, END, COLUMNS
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
    uint64_t last_category[4];
    int64_t last_number;
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

/* Not 0 if a byte of the word is 0. */
static uint64_t zero_byte(uint64_t word) {
    return (word - 0x0101010101010101ull) & ~word & 0x8080808080808080ull;
}

/* Skip a string from its first character, `at`, past the closing quote. Returns NULL if it is not closed. */
static const uint8_t *skip_string(const uint8_t *at, const uint8_t *end, int *escaped) {
    for (;;) {
        /* Eight characters at a time: is one of them a quote or a backslash? */
        while (end - at >= 8) {
            uint64_t word;
            memcpy(&word, at, 8);
            if (zero_byte(word ^ 0x2222222222222222ull) | zero_byte(word ^ 0x5C5C5C5C5C5C5C5Cull)) break;
            at += 8;
        }
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

/* Parse a number, rounded as Python rounds it. Returns 0 if the value is not one. */
static int number(const Value *value, double *out) {
    static const double powers[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    const uint8_t *at = value->begin, *end = value->end;
    int negative = *at == '-', digits = 0, behind = 0, point = 0;
    int64_t found = 0;
    for (at += negative; at < end && digits <= 15; at++) {
        if (*at == '.' && !point && digits) {
            point = 1;
        } else if (*at >= '0' && *at <= '9') {
            found = found * 10 + (*at - '0');
            digits += found > 0 || digits;
            behind += point;
        } else {
            break;
        }
        if (behind > 15) break;
    }
    if (at == end && end - value->begin > negative && digits <= 15) {
        /* Both are exact, so the division rounds correctly. */
        *out = (negative ? -1.0 : 1.0) * ((double)found / powers[behind]);
        return 1;
    }
    char copy[64];
    size_t length = (size_t)(end - value->begin);
    if (length >= sizeof copy || *value->begin == '"' || (copy[0] = (char)*value->begin, copy[0] != '-' && (copy[0] < '0' || copy[0] > '9')))
        return 0;
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
static int64_t category(Scan *scan, const Value *value) {
    uint8_t name[32] = {0};
    size_t length = (size_t)(value->end - value->begin);
    if (length >= sizeof name) return NONE;
    for (size_t i = 0; i < length; i++) {
        uint8_t letter = value->begin[i];
        name[i] = letter >= 'A' && letter <= 'Z' ? letter + 32 : letter;
    }
    if (memcmp(scan->last_category, name, sizeof name) == 0) return scan->last_number;
    memcpy(scan->last_category, name, sizeof name);
    scan->last_number = NONE;
    const char *at = scan->categories, *end = at + scan->categories_length;
    for (int64_t found = 0; at < end; found++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        if (!stop) break;
        if ((size_t)(stop - at) == length && memcmp(at, name, length) == 0) scan->last_number = found;
        at = stop + 1;
    }
    return scan->last_number;
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
        case 's': if (is(&key, "stream")) take_whole(&value, row, STREAM); break;
        case 'g': if (is(&key, "grid")) take_span(scan, &value, row, GRID_BEGIN, GRID_END); break;
        case 'b': if (is(&key, "block")) take_span(scan, &value, row, BLOCK_BEGIN, BLOCK_END); break;
        case 'C': if (is(&key, "Collective name")) row[ODD] = 1; break;
        case 'P': if (is(&key, "Process Group Name")) row[ODD] = 1; break;
        default: break;
        }
    }
}

/* Parse an event from behind its opening brace. Returns where it ends, or NULL. `kept`: whether it is wanted. */
static const uint8_t *take_event(Scan *scan, const uint8_t *at, int64_t *row, double *times, int *kept) {
    Value key, value;
    int complete = 0;
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
        if (is(&key, "ph")) complete = is(&value, "\"X\"");
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
    Scan scan = {BYTES(a[0]), BYTES(a[0]) + AXIS(a[0], 0), (const char *)BYTES(a[2]), AXIS(a[2], 0), 0, {0}, NONE};
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

static PyMethodDef methods[] = {
    {"scan_events", (PyCFunction)(void (*)(void))scan_events, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_events", .m_doc = NULL, .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__events(void) { return PyModule_Create(&definition); }
