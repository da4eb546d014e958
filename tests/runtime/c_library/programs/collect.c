/* A function of a host that has an interpreter already: all pieces of a request, by callback. Each
 * must be whole characters; what they are is joined, with a bar behind each. */

#include <string.h>

#include "check.h"

int collect(eg_request request, char *text, size_t capacity);

struct joined {
    char *text;
    size_t capacity;
};

static int join(void *user, const eg_piece *piece)
{
    struct joined *joined = user;
    CHECK(is_whole(piece->text, piece->length));
    CHECK(strlen(joined->text) + piece->length + 2 <= joined->capacity);
    strncat(joined->text, piece->text, piece->length);
    strcat(joined->text, "|");
    return 0;
}

int collect(eg_request request, char *text, size_t capacity)
{
    struct joined joined = {text, capacity};
    *text = '\0';
    return eg_stream(request, join, &joined);
}
