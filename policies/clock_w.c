/* CLOCK-W (PCM swap §III-4): the hand of clock.c, which must lie beside this, goes by writes. A page
 * that was written since the hand last passed gets another lap, and reads give none: so fewer pages
 * must be written out.
 *
 * Differs: a scan shows uses, and not which of them write. A page that is used was written if the
 * fault that brought it was a write, or if it needed a new copy when it last left memory, as pages
 * do that were written (UC_STORED). Where tiers keep no copies, each page that comes back does. */
#define BY_WRITES 1
#include "clock.c"
