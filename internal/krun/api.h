// The part of libkrun's ABI 1 that this project calls, bound at run time.
#ifndef III_KRUN_API_H
#define III_KRUN_API_H

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef SIGRTMIN
#define III_WAKE_SIGNAL SIGRTMIN
#else
#define III_WAKE_SIGNAL SIGUSR1
#endif

enum { required, optional };

// SYMBOLS lists them: name without krun_, whether a library may lack it,
// parameters, and their names alone.
#define SYMBOLS(X) \
	X(init_log, required, (int fd, uint32_t level, uint32_t style, uint32_t options), (fd, level, style, options)) \
	X(has_feature, optional, (uint64_t feature), (feature)) \
	X(get_max_vcpus, optional, (), ()) \
	X(check_nested_virt, optional, (), ()) \
	X(create_ctx, required, (), ()) \
	X(free_ctx, required, (uint32_t ctx), (ctx)) \
	X(set_vm_config, required, (uint32_t ctx, uint8_t cpus, uint32_t mib), (ctx, cpus, mib)) \
	X(set_nested_virt, optional, (uint32_t ctx, bool on), (ctx, on)) \
	X(set_root, required, (uint32_t ctx, const char *dir), (ctx, dir)) \
	X(add_virtiofs3, optional, (uint32_t ctx, const char *tag, const char *dir, uint64_t window, bool readonly), (ctx, tag, dir, window, readonly)) \
	X(add_disk2, required, (uint32_t ctx, const char *id, const char *file, uint32_t format, bool readonly), (ctx, id, file, format, readonly)) \
	X(add_disk3, optional, (uint32_t ctx, const char *id, const char *file, uint32_t format, bool readonly, bool direct, uint32_t sync), \
		(ctx, id, file, format, readonly, direct, sync)) \
	X(disable_implicit_console, required, (uint32_t ctx), (ctx)) \
	X(add_virtio_console_default, required, (uint32_t ctx, int in, int out, int err), (ctx, in, out, err)) \
	X(add_virtio_console_multiport, required, (uint32_t ctx), (ctx)) \
	X(add_console_port_inout, required, (uint32_t ctx, uint32_t console, const char *name, int in, int out), (ctx, console, name, in, out)) \
	X(disable_implicit_vsock, required, (uint32_t ctx), (ctx)) \
	X(add_vsock, required, (uint32_t ctx, uint32_t tsi), (ctx, tsi)) \
	X(add_vsock_port2, required, (uint32_t ctx, uint32_t port, const char *file, bool listen), (ctx, port, file, listen)) \
	X(add_net_unixstream, optional, (uint32_t ctx, const char *file, int fd, uint8_t *mac, uint32_t features, uint32_t flags), \
		(ctx, file, fd, mac, features, flags)) \
	X(add_net_unixgram, optional, (uint32_t ctx, const char *file, int fd, uint8_t *mac, uint32_t features, uint32_t flags), \
		(ctx, file, fd, mac, features, flags)) \
	X(set_exec, required, (uint32_t ctx, const char *file, const char **argv, const char **envp), (ctx, file, argv, envp)) \
	X(set_workdir, required, (uint32_t ctx, const char *dir), (ctx, dir)) \
	X(set_rlimits, required, (uint32_t ctx, const char **limits), (ctx, limits)) \
	X(start_enter, required, (uint32_t ctx), (ctx))

// struct api has what dlsym found; NULL for what the library lacks.
#define FIELD(name, need, params, args) int32_t(*name) params;
struct api {
	SYMBOLS(FIELD)
};
#undef FIELD

// call_NAME calls a symbol, or answers for one that is not there.
#define WITH_API(...) (const struct api *api __VA_OPT__(, ) __VA_ARGS__)
#define CALL(name, need, params, args) \
	static inline int32_t call_##name WITH_API params { return api->name ? api->name args : -ENOSYS; }
SYMBOLS(CALL)
#undef CALL

struct symbol {
	const char *name;
	int need;
	size_t at;
};

#define ENTRY(name, need, params, args) {"krun_" #name, need, offsetof(struct api, name)},
static const struct symbol symbols[] = {SYMBOLS(ENTRY)};
#undef ENTRY

static inline size_t symbol_count(void) { return sizeof symbols / sizeof symbols[0]; }
static inline const char *symbol_name(size_t i) { return symbols[i].name; }
static inline bool symbol_required(size_t i) { return symbols[i].need == required; }

// bind looks one symbol up and tells whether it is there.
static inline bool bind_symbol(struct api *api, void *library, size_t i) {
	void *found = dlsym(library, symbols[i].name);
	*(void **)((char *)api + symbols[i].at) = found;
	return found != NULL;
}

// abort_plainly gives SIGABRT its default action back: libkrun aborts where it
// does not like something, and Go would print all its goroutines on it and exit
// with a status of its own.
static inline void abort_plainly(void) { signal(SIGABRT, SIG_DFL); }

// enter starts the VM on the calling thread, which takes no signal any more but
// those of faults and the one by which libkrun wakes its CPUs: a signal would cut
// a blocking send of the VM's vsock short.
static inline int32_t enter(const struct api *api, uint32_t ctx) {
	const int kept[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, III_WAKE_SIGNAL};
	sigset_t mask, before;
	sigfillset(&mask);
	for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++)
		sigdelset(&mask, kept[i]);
	pthread_sigmask(SIG_SETMASK, &mask, &before);
	int32_t result = call_start_enter(api, ctx);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return result;
}

#endif
