/* What a walk through memory has passed leaves first: the rest stays, and is there when the walk
 * comes round again. Least recently used is wrong there: it lets go what is needed next. */
#include "undercroft_policy.h"

static int32_t behind;

void init(void) {
    static const char name[] = "behind";
    behind = register_parameter(name, sizeof name - 1, 96);
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail) {
    if (kind != UC_FAULT && kind != UC_CAME_ALONG) return;
    int64_t passed = page - get_parameter(behind);
    if (get_page_state(space, passed) == UC_IN) reclaim(space, passed);
}
