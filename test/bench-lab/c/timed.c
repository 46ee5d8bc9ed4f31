// A libkrun that tells when it is called: this library has two of the functions,
// and the library behind it, which it needs, has the rest. It prints
// "krun-time WHAT NANOSECONDS" of the wall clock on stderr.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

static void stamp(const char *what)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	dprintf(2, "krun-time %s %lld\n", what, now.tv_sec * 1000000000LL + now.tv_nsec);
}

__attribute__((constructor)) static void loaded(void) { stamp("loaded"); }

int32_t krun_create_ctx(void)
{
	stamp("context");
	return ((int32_t(*)(void))dlsym(RTLD_NEXT, "krun_create_ctx"))();
}

int32_t krun_start_enter(uint32_t ctx)
{
	stamp("enter");
	return ((int32_t(*)(uint32_t))dlsym(RTLD_NEXT, "krun_start_enter"))(ctx);
}
