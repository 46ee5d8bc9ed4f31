// The part of libkrun's ABI 1 that this project calls, bound at run time.
#ifndef III_KRUN_API_H
#define III_KRUN_API_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { required, optional };

// SYMBOLS lists them: name without krun_, whether a library may lack it,
// parameters, and their names alone.
#define SYMBOLS(X) \
	X(init_log, required, (int fd, uint32_t level, uint32_t style, uint32_t options), (fd, level, style, options)) \
	X(has_feature, optional, (uint64_t feature), (feature)) \
	X(create_ctx, required, (), ()) \
	X(set_vm_config, required, (uint32_t ctx, uint8_t cpus, uint32_t mib), (ctx, cpus, mib)) \
	X(set_nested_virt, optional, (uint32_t ctx, bool on), (ctx, on)) \
	X(set_root, required, (uint32_t ctx, const char *dir), (ctx, dir)) \
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
	X(set_exec, required, (uint32_t ctx, const char *file, const char **argv, const char **envp), (ctx, file, argv, envp)) \
	X(start_enter, required, (uint32_t ctx), (ctx))

#define WITH_API(...) (const struct api *api __VA_OPT__(, ) __VA_ARGS__)

#define FIELD(name, need, params, args) int32_t(*name) params;
struct api {
	SYMBOLS(FIELD)
};
#undef FIELD

// call_NAME calls a symbol, or answers for one that is not there.
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

#endif
