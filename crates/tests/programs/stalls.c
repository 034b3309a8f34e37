// Tells for how long a CPU was taken away, until its standard input ends: stalls. A thread of the highest priority on each CPU
// sleeps 0.2 ms at a time. What it sleeps longer, no other thread of that CPU had either: a hypervisor or the kernel had it.
// Prints the longest stall in microseconds. Ends with 77 where real-time priority is refused.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAUSE_NS 200000

static int ends;
static long longest[CPU_SETSIZE];

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void *watch(void *number) {
    long cpu = (long)number;
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    long before = now_ns();
    while (!__atomic_load_n(&ends, __ATOMIC_RELAXED)) {
        nanosleep(&pause, NULL);
        long after = now_ns();
        long stall = after - before - PAUSE_NS;
        if (stall > longest[cpu]) {
            longest[cpu] = stall;
        }
        before = after;
    }
    return NULL;
}

int main(void) {
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) {
        perror("stalls: sched_getaffinity");
        return 1;
    }
    static pthread_t threads[CPU_SETSIZE];
    for (long cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &cpus)) {
            continue;
        }
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        struct sched_param highest = {.sched_priority = sched_get_priority_max(SCHED_FIFO)};
        pthread_attr_t how;
        pthread_attr_init(&how);
        pthread_attr_setaffinity_np(&how, sizeof one, &one);
        pthread_attr_setinheritsched(&how, PTHREAD_EXPLICIT_SCHED);
        pthread_attr_setschedpolicy(&how, SCHED_FIFO);
        pthread_attr_setschedparam(&how, &highest);
        int error = pthread_create(&threads[cpu], &how, watch, (void *)cpu);
        if (error != 0) {
            fprintf(stderr, "stalls: a thread of the highest priority: %s\n", strerror(error));
            return 77;
        }
    }
    char rest[64];
    while (read(0, rest, sizeof rest) > 0) {
    }
    __atomic_store_n(&ends, 1, __ATOMIC_RELAXED);
    long most = 0;
    for (long cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &cpus)) {
            pthread_join(threads[cpu], NULL);
            most = longest[cpu] > most ? longest[cpu] : most;
        }
    }
    printf("%ld\n", most / 1000);
    return 0;
}
