/* The last error of each thread. It lives in the thread's own storage, so nothing has to be freed,
 * and running out of memory can be told. */

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "interface.h"

/* A longer text is cut: the first faults of a file say enough. */
#define LONGEST 4096

static _Thread_local eg_status last_code = EG_OK;
static _Thread_local char last_text[LONGEST];

/* Shorten a text that was cut to whole characters. */
static void end_whole(char *text, size_t length)
{
    size_t first = length;
    while (first > 0 && ((unsigned char)text[first - 1] & 0xC0) == 0x80)
        first--;
    if (first == 0)
        return;
    unsigned char lead = (unsigned char)text[first - 1];
    size_t takes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    if (length - (first - 1) < takes)
        text[first - 1] = '\0';
}

eg_status eg_tell(eg_status code, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    int length = vsnprintf(last_text, LONGEST, format, values);
    va_end(values);
    if (length < 0)
        last_text[0] = '\0';
    else if (length >= LONGEST)
        end_whole(last_text, LONGEST - 1);
    last_code = code;
    return code;
}

eg_status eg_tell_text(eg_status code, const char *text)
{
    return eg_tell(code, "%s", text);
}

eg_status eg_last_error(const char **text)
{
    if (text != NULL)
        *text = last_text;
    return last_code;
}
