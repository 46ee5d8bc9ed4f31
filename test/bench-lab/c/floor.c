// The floor of a libkrun VM: a program that makes the calls and nothing else.
//
//	floor shell LIBDIR MIB ROOT              boots a shell in ROOT with what
//	                                         libkrun does by itself; it prints "ready"
//	floor calls LIBDIR MIB ROOT LOWER UPPER  makes the calls that krun-shim makes,
//	                                         and ends where the VM would start
//	floor nothing                            ends at once
//
// Before the VM starts it prints "enter NANOSECONDS" of the wall clock on stderr.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void *library;

static void fail(const char *what, int status)
{
	fprintf(stderr, "floor: %s: %d %s\n", what, status, status == 0 ? dlerror() : strerror(-status));
	exit(1);
}

static void *symbol(const char *name)
{
	void *found = dlsym(library, name);
	if (!found)
		fail(name, 0);
	return found;
}

// CALL calls a function of libkrun by its name; each returns a negative error.
#define CALL(name, types, ...)                                                 \
	({                                                                     \
		int32_t status = ((int32_t(*) types)symbol(#name))(__VA_ARGS__); \
		if (status < 0)                                                \
			fail(#name, status);                                   \
		status;                                                        \
	})

static void load(const char *dir)
{
	char path[512];
	snprintf(path, sizeof path, "%s/libkrunfw.so.5", dir);
	if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL))
		fail(path, 0);
	snprintf(path, sizeof path, "%s/libkrun.so.1", dir);
	library = dlopen(path, RTLD_NOW);
	if (!library)
		fail(path, 0);
}

static void calls(uint32_t ctx, char **argv)
{
	int null = open("/dev/null", O_RDWR), ends[2];
	if (null < 0 || pipe(ends) < 0)
		fail("open", -1);
	CALL(krun_disable_implicit_console, (uint32_t), ctx);
	CALL(krun_disable_implicit_vsock, (uint32_t), ctx);
	CALL(krun_add_vsock, (uint32_t, uint32_t), ctx, 0);
	CALL(krun_add_vsock_port2, (uint32_t, uint32_t, const char *, bool), ctx, 1024, "link.sock", false);
	CALL(krun_set_root, (uint32_t, const char *), ctx, argv[4]);
	CALL(krun_add_disk3, (uint32_t, const char *, const char *, uint32_t, bool, bool, uint32_t), ctx, "lower", argv[5], 0, true, false, 0);
	CALL(krun_add_disk3, (uint32_t, const char *, const char *, uint32_t, bool, bool, uint32_t), ctx, "upper", argv[6], 0, false, false, 0);
	CALL(krun_add_virtio_console_default, (uint32_t, int, int, int), ctx, -1, null, null);
	int console = CALL(krun_add_virtio_console_multiport, (uint32_t), ctx);
	CALL(krun_add_console_port_inout, (uint32_t, uint32_t, const char *, int, int), ctx, console, "iii.env", ends[0], null);
	const char *args[] = {NULL}, *env[] = {"KRUN_INIT_PID1=1", NULL};
	CALL(krun_set_exec, (uint32_t, const char *, const char *const *, const char *const *), ctx, "/agent", args, env);
}

static void shell(uint32_t ctx, char **argv)
{
	const char *args[] = {"-c", "echo ready", NULL}, *env[] = {NULL};
	CALL(krun_set_root, (uint32_t, const char *), ctx, argv[4]);
	CALL(krun_set_exec, (uint32_t, const char *, const char *const *, const char *const *), ctx, "/bin/sh", args, env);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "nothing"))
		return 0;
	bool boot = argc == 5 && !strcmp(argv[1], "shell");
	if (!boot && (argc != 7 || strcmp(argv[1], "calls")))
		return 2;
	load(argv[2]);
	uint32_t ctx = CALL(krun_create_ctx, (void));
	CALL(krun_set_vm_config, (uint32_t, uint8_t, uint32_t), ctx, 1, atoi(argv[3]));
	(boot ? shell : calls)(ctx, argv);
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	dprintf(2, "enter %lld\n", now.tv_sec * 1000000000LL + now.tv_nsec);
	if (!boot)
		_exit(0);
	CALL(krun_start_enter, (uint32_t), ctx);
	return 1;
}
