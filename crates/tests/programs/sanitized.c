// Allocates, frees and checks, so that a sanitizer's allocator and thread hooks are used.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *work(void *of) {
    char *text = malloc(100);
    strcpy(text, of);
    return text;
}

int main(void) {
    pthread_t thread;
    void *text;
    pthread_create(&thread, NULL, work, "sanitized");
    pthread_join(thread, &text);
    puts(text);
    free(text);
    return 0;
}
