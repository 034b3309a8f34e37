/* What a policy file may call, and what it must have: version 1 of the interface.
 *
 * Pages are numbers: an address divided by the size of a page, 4096 in a process. A space is one
 * address space of the program. docs/guide/policies.md says the rest. */
#ifndef UNDERCROFT_POLICY_H
#define UNDERCROFT_POLICY_H

#include <stdint.h>

#define UC_IMPORT(name) __attribute__((import_module("undercroft"), import_name(#name))) name
#define UC_EXPORT(name) __attribute__((export_name(#name))) name

/* What happened. `pages` pages from `page` on; 0 where there is none. */
enum uc_kind {
    UC_FAULT = 1,     /* a fault brought the page in; detail: thread * 2 + (1 for a write) */
    UC_CAME_ALONG,    /* it came in with a fault on another page */
    UC_LEFT,          /* it was chosen, and leaves memory */
    UC_STAYED,        /* it was chosen, and stays or was put back */
    UC_USED,          /* a scan of access bits found it used */
    UC_FOUND,         /* it is in memory, and was not known */
    UC_DROPPED,       /* the program dropped the range */
    UC_MOVED,         /* the range moved; detail: the page with which its new place begins */
    UC_FORKED,        /* the space is a fork child with what its parent has; detail: the parent */
    UC_ENDED,         /* the space is gone */
    UC_LIMIT,         /* the limit was set; detail: bytes */
    UC_TICK,          /* time passes, ten times a second; detail: milliseconds since the start */
    UC_LOST,          /* events were dropped because the policy was late; detail: how many */
    UC_ACCESSED,      /* of the 64 pages some were used since the last scan; detail: a bit for each */
    UC_SCANNED,       /* all uses of a scan have been told: `pages`; detail: as UC_TICK */
    /* These two come only to a file that imports a function of tiers, such as get_tier_count. */
    UC_STORED,        /* a copy was written; detail: tier * 2 + (1 if it moved between tiers) */
    UC_LOADED,        /* a thread waited for the page, after its UC_FAULT; detail: from which tier */
};

enum uc_state { UC_UNKNOWN, UC_IN, UC_OUT };

/* The page shall leave first when room is needed. 0: this event has named too many. */
int32_t UC_IMPORT(reclaim)(int32_t space, int64_t page);
/* The page shall leave, although there may be room. 0: as above. */
int32_t UC_IMPORT(reclaim_now)(int32_t space, int64_t page);
/* The page, which is out of memory, shall come while there is room. 0: as above. */
int32_t UC_IMPORT(prefetch)(int32_t space, int64_t page);
/* Access bits shall be scanned at this interval: 10 ms to 1 h, 0: not any more. 0: it is another. */
int32_t UC_IMPORT(scan)(int64_t milliseconds);
/* The page of a space that has a page of a program, and the reverse; -1: that is not known. In a
 * process it is the same one. In a guest, by the page tables of `cr3`: the program's pages have 4096
 * bytes. */
int64_t UC_IMPORT(gva_to_hva)(int32_t space, int64_t cr3, int64_t page);
int64_t UC_IMPORT(hva_to_gva)(int32_t space, int64_t cr3, int64_t page);
/* Where a page is, by the events heard so far. */
int32_t UC_IMPORT(get_page_state)(int32_t space, int64_t page);
/* The instruction whose fault this event is; 0: it is of none, or that is not known. */
int64_t UC_IMPORT(get_fault_ip)(void);
/* The page tables of the guest's program whose fault this event is; 0: as above. */
int64_t UC_IMPORT(get_fault_cr3)(void);
/* Bytes of the limit, and in use; page faults so far. */
int64_t UC_IMPORT(get_memory_limit)(void);
int64_t UC_IMPORT(get_memory_usage)(void);
int64_t UC_IMPORT(get_pf_count)(void);
/* Milliseconds so far in which some thread of the program waited for a page. */
int64_t UC_IMPORT(get_waited_ms)(void);
/* Gives a number a name, which status and report show. Returns its number, or -1. */
int32_t UC_IMPORT(register_parameter)(const char *name, int32_t bytes, int64_t value);
int64_t UC_IMPORT(get_parameter)(int32_t parameter);
/* Shows another value of a parameter. 0: there is none of this number. */
int32_t UC_IMPORT(set_parameter)(int32_t parameter, int64_t value);

/* Tiers have numbers, the fastest is 0. A file that calls one of these hears UC_STORED and UC_LOADED.
 * How many there are. */
int32_t UC_IMPORT(get_tier_count)(void);
/* A number of a tier; -1: there is no such tier. */
enum uc_tier {
    UC_TIER_KIND,     /* 0: compressed in DRAM, 1: memory that is not DRAM, 2: a device */
    UC_TIER_BYTES,    /* that it may hold */
    UC_TIER_FREE,     /* bytes that are free */
    UC_TIER_LOAD_NS,  /* nanoseconds of a load lately; 0 before the first */
};
int64_t UC_IMPORT(get_tier)(int32_t tier, int32_t what);
/* When the page next leaves, a new copy of it shall be in this tier, if it takes it. 0: as of `reclaim`. */
int32_t UC_IMPORT(place)(int32_t space, int64_t page, int32_t tier);
/* When a thread waits for `page`, the page `next` shall come along, and what comes with that, up to 63
 * pages. The page itself: none. 0: as of `reclaim`. */
int32_t UC_IMPORT(link_page)(int32_t space, int64_t page, int64_t next);
/* Those of `pages` pages (1 to 256) whose copies are in the tier `from` shall move to `to`. 0: too
 * many moves wait, or as of `reclaim`. */
int32_t UC_IMPORT(move_pages)(int32_t space, int64_t page, int32_t pages, int32_t from, int32_t to);

/* Called for each event. */
void UC_EXPORT(on_event)(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail);
/* Called once, before the first event. */
void UC_EXPORT(init)(void);

int32_t UC_EXPORT(abi_version)(void) { return 1; }

#endif
