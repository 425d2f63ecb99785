/*
 * report.c - why something failed, in words for a person
 *
 * The texts end up in logs, in replies to clients and on terminals, and they quote names from files
 * that nobody has checked. So every text is made harmless here, in one place, whatever its parts
 * were: control characters and bytes that are not UTF-8 become '?', and a cut never leaves half a
 * character behind.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "report.h"

/* Bytes of the valid, printable UTF-8 sequence at s; 0 when there is none. */
static size_t sequence(const unsigned char *s)
{
    size_t n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;

    if (n == 1)
        return s[0] >= 0x20 && s[0] != 0x7f;
    if (n == 0 || s[0] > 0xf4)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    /* C1 controls, overlong forms, surrogates, beyond U+10FFFF. */
    if ((s[0] == 0xc2 && s[1] < 0xa0) || (s[0] == 0xe0 && s[1] < 0xa0) ||
        (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return n;
}

static void clean(char *text)
{
    for (unsigned char *s = (unsigned char *)text; *s;) {
        size_t n = sequence(s);

        if (n == 0)
            *s = '?';
        s += n ? n : 1;
    }
}

int report_set(struct report *report, int r, const char *format, ...)
{
    va_list args;

    if (!report)
        return r;
    va_start(args, format);
    vsnprintf(report->text, sizeof(report->text), format, args);
    va_end(args);
    clean(report->text);
    return r;
}

int report_prefix(struct report *report, int r, const char *format, ...)
{
    char old[sizeof(report->text)];
    va_list args;
    size_t n;

    if (!report)
        return r;
    memcpy(old, report->text, sizeof(old));
    va_start(args, format);
    vsnprintf(report->text, sizeof(report->text), format, args);
    va_end(args);
    n = strlen(report->text);
    memccpy(report->text + n, old, 0, sizeof(report->text) - n);
    report->text[sizeof(report->text) - 1] = 0;
    clean(report->text);
    return r;
}
