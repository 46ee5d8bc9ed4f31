// The process of a VM. It reads a list of calls (type Sequence in Go) from its
// standard input and makes them; the last one does not return. It is C alone, and
// runs before Go's runtime would start: libkrun ends, aborts and signals its
// process, and a VM needs neither the time nor the memory of a second runtime.

#define _GNU_SOURCE

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/landlock.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include "api.h"

// As in sequence.go.
#define CHILD_COMMAND "__libkrun"
enum { status_refused = 125, report_file = 5, max_size = 1 << 20, max_strings = 256 };

// lifeline_stack is enough to read one byte, and not below what C libraries take:
// 128 KiB where glibc runs on arm64. In bytes, of which few are touched.
enum { lifeline_stack = 256 * 1024 };

struct child {
	char *at, *end; // of the list
	long order;     // which one it is at, from 0
	struct api api;
	uint32_t ctx, console;
};

// refuse ends the process and tells which order it was, what came of it, and why.
static _Noreturn void refuse(const struct child *c, const char *what, int32_t result, const char *words)
{
	dprintf(report_file, "%s %ld %d %s\n", what, c->order, result, words);
	_exit(status_refused);
}

// text is the next argument. It stays where it is, for the life of the process.
static const char *text(struct child *c)
{
	char *at = c->at;
	char *zero = memchr(at, 0, (size_t)(c->end - at));
	if (!zero)
		refuse(c, "list", 0, "it ends within an argument");
	c->at = zero + 1;
	return at;
}

static int64_t number(struct child *c)
{
	const char *digits = text(c);
	char *rest;
	errno = 0;
	long long n = strtoll(digits, &rest, 10);
	if (errno || rest == digits || *rest)
		refuse(c, "list", 0, "an argument is no number");
	return n;
}

// strings is a list of the next arguments behind their number, and a NULL.
static const char **strings(struct child *c)
{
	int64_t n = number(c);
	if (n < 0 || n > max_strings)
		refuse(c, "list", 0, "an argument has too many strings");
	const char **list = calloc((size_t)n + 1, sizeof *list);
	if (!list)
		refuse(c, "list", 0, "there is no memory for it");
	for (int64_t i = 0; i < n; i++)
		list[i] = text(c);
	return list;
}

// confine restricts the process to a Landlock ruleset, and to reading its own
// entry of /proc, which nobody else could put into the ruleset before. Not after
// there is another thread.
static int32_t confine(struct child *c)
{
	int64_t ruleset = number(c), flags = number(c);
#ifdef __linux__
	struct landlock_path_beneath_attr self = {
		.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR,
		.parent_fd = open("/proc/self", O_PATH | O_CLOEXEC),
	};
	if (self.parent_fd < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
		syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &self, 0) ||
		syscall(SYS_landlock_restrict_self, ruleset, flags))
		return -errno;
	close(self.parent_fd);
	close((int)ruleset);
	return 0;
#else
	(void)ruleset, (void)flags;
	return -ENOSYS;
#endif
}

// lifeline ends the process, with its VM, when the other end of its standard
// input is closed. By a signal, since exiting would wait for libkrun's threads.
static void *lifeline(void *unused)
{
	char byte;
	ssize_t n;
	do
		n = read(0, &byte, 1);
	while (n > 0 || (n < 0 && errno == EINTR));
	kill(getpid(), SIGKILL);
	return unused;
}

static int32_t watch(struct child *c)
{
	(void)c;
	pthread_attr_t small;
	pthread_t thread;
	int failed = pthread_attr_init(&small);
	if (!failed)
		failed = pthread_attr_setstacksize(&small, lifeline_stack);
	if (!failed)
		failed = pthread_create(&thread, &small, lifeline, NULL);
	return -failed;
}

// load binds libkrun. Its firmware comes first where it is named: libkrun itself
// would look only where the system has its libraries, and when the VM starts.
static int32_t load(struct child *c)
{
	const char *library = text(c), *firmware = text(c);
	if (*firmware && !dlopen(firmware, RTLD_NOW | RTLD_GLOBAL))
		refuse(c, "firmware", 0, dlerror());
	void *handle = dlopen(library, RTLD_NOW);
	if (!handle)
		refuse(c, "library", 0, dlerror());
	char lacking[1024] = "";
	for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
		void *found = dlsym(handle, symbols[i].name);
		memcpy((char *)&c->api + symbols[i].at, &found, sizeof found);
		if (found || symbols[i].need == optional)
			continue;
		size_t used = strlen(lacking);
		snprintf(lacking + used, sizeof lacking - used, "%s%s", used ? ", " : "", symbols[i].name);
	}
	if (*lacking)
		refuse(c, "lacking", 0, lacking);
	return 0;
}

static int32_t add_disk(struct child *c)
{
	const char *id = text(c), *file = text(c);
	int64_t format = number(c), readonly = number(c), direct = number(c), sync = number(c);
	return call_add_disk3(&c->api, c->ctx, id, file, (uint32_t)format, readonly, direct, (uint32_t)sync);
}

static int32_t add_network(struct child *c)
{
	int64_t fd = number(c);
	uint8_t mac[6];
	for (size_t i = 0; i < sizeof mac; i++)
		mac[i] = (uint8_t)number(c);
	int64_t features = number(c), flags = number(c);
	return call_add_net_unixstream(&c->api, c->ctx, NULL, (int)fd, mac, (uint32_t)features, (uint32_t)flags);
}

static int32_t add_vsock_port(struct child *c)
{
	int64_t port = number(c);
	const char *file = text(c);
	return call_add_vsock_port2(&c->api, c->ctx, (uint32_t)port, file, number(c));
}

static int32_t add_console(struct child *c)
{
	int64_t in = number(c), out = number(c), err = number(c);
	return call_add_virtio_console_default(&c->api, c->ctx, (int)in, (int)out, (int)err);
}

static int32_t add_multiport(struct child *c)
{
	int32_t console = call_add_virtio_console_multiport(&c->api, c->ctx);
	c->console = (uint32_t)console;
	return console;
}

static int32_t add_port(struct child *c)
{
	const char *name = text(c);
	int64_t in = number(c), out = number(c);
	return call_add_console_port_inout(&c->api, c->ctx, c->console, name, (int)in, (int)out);
}

static int32_t set_exec(struct child *c)
{
	const char *file = text(c);
	const char **argv = strings(c), **envp = strings(c);
	return call_set_exec(&c->api, c->ctx, file, argv, envp);
}

static int32_t set_vm_config(struct child *c)
{
	int64_t cpus = number(c), mib = number(c);
	return call_set_vm_config(&c->api, c->ctx, (uint8_t)cpus, (uint32_t)mib);
}

static int32_t create_ctx(struct child *c)
{
	int32_t ctx = call_create_ctx(&c->api);
	c->ctx = (uint32_t)ctx;
	return ctx;
}

static int32_t init_log(struct child *c)
{
	int64_t fd = number(c), level = number(c), style = number(c), options = number(c);
	return call_init_log(&c->api, (int)fd, (uint32_t)level, (uint32_t)style, (uint32_t)options);
}

// has_feature fails too where the library does not know the feature, but not where
// it cannot be asked, before 1.17.3: then the calls that need it will tell.
static int32_t has_feature(struct child *c)
{
	int32_t answer = call_has_feature(&c->api, (uint64_t)number(c));
	return answer == 1 || answer == -ENOSYS ? 0 : -ENOTSUP;
}

// describe tells what the library can do, instead of a VM: a bit for each feature,
// in hexadecimal, and the functions that it lacks.
static int32_t describe(struct child *c)
{
	enum { features = 64 };
	uint64_t has = 0;
	for (uint64_t i = 0; i < features; i++)
		if (call_has_feature(&c->api, i) == 1)
			has |= UINT64_C(1) << i;
	char words[1024];
	size_t used = (size_t)snprintf(words, sizeof words, "%llx", (unsigned long long)has);
	for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
		void *found;
		memcpy(&found, (char *)&c->api + symbols[i].at, sizeof found);
		if (!found && used < sizeof words)
			used += (size_t)snprintf(words + used, sizeof words - used, " %s", symbols[i].name);
	}
	refuse(c, "described", 0, words);
}

static int32_t set_nested_virt(struct child *c) { return call_set_nested_virt(&c->api, c->ctx, number(c)); }
static int32_t disable_console(struct child *c) { return call_disable_implicit_console(&c->api, c->ctx); }
static int32_t disable_vsock(struct child *c) { return call_disable_implicit_vsock(&c->api, c->ctx); }
static int32_t add_vsock(struct child *c) { return call_add_vsock(&c->api, c->ctx, (uint32_t)number(c)); }
static int32_t set_root(struct child *c) { return call_set_root(&c->api, c->ctx, text(c)); }
static int32_t start_enter(struct child *c) { return call_start_enter(&c->api, c->ctx); }

static const struct {
	const char *name;
	int32_t (*make)(struct child *);
} orders[] = {
	{"confine", confine},
	{"watch", watch},
	{"load", load},
	{"init_log", init_log},
	{"has_feature", has_feature},
	{"describe", describe},
	{"create_ctx", create_ctx},
	{"set_vm_config", set_vm_config},
	{"set_nested_virt", set_nested_virt},
	{"disable_implicit_console", disable_console},
	{"disable_implicit_vsock", disable_vsock},
	{"add_vsock", add_vsock},
	{"add_vsock_port2", add_vsock_port},
	{"set_root", set_root},
	{"add_disk3", add_disk},
	{"add_virtio_console_default", add_console},
	{"add_virtio_console_multiport", add_multiport},
	{"add_console_port_inout", add_port},
	{"add_net_unixstream", add_network},
	{"set_exec", set_exec},
	{"start_enter", start_enter},
};

// make carries out one order.
static int32_t make(struct child *c)
{
	const char *name = text(c);
	for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++)
		if (!strcmp(orders[i].name, name))
			return orders[i].make(c);
	refuse(c, "list", 0, "the order is unknown");
}

// fill reads size bytes and tells whether they all came.
static bool fill(void *into, size_t size)
{
	for (char *at = into; size;) {
		ssize_t n = read(0, at, size);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		at += n, size -= (size_t)n;
	}
	return true;
}

static _Noreturn void be_child(void)
{
	struct child c = {0};
	uint8_t head[4];
	if (fcntl(report_file, F_GETFD) < 0) {
		dprintf(2, "krun-shim: " CHILD_COMMAND " is for krun-shim itself\n");
		_exit(status_refused);
	}
	// libkrun writes to sockets and pipes whose readers may be gone first.
	signal(SIGPIPE, SIG_IGN);
	if (!fill(head, sizeof head))
		refuse(&c, "list", 0, "there is none");
	size_t size = (size_t)head[0] << 24 | (size_t)head[1] << 16 | (size_t)head[2] << 8 | head[3];
	char *list = size <= max_size ? malloc(size) : NULL;
	if (!list || !fill(list, size))
		refuse(&c, "list", 0, "it is too long, or not whole");
	c.at = list, c.end = list + size;
	for (; c.at < c.end; c.order++) {
		int32_t result = make(&c);
		if (result < 0)
			refuse(&c, "call", result, "");
	}
	refuse(&c, "list", 0, "it does not start a VM");
}

#if defined(__GLIBC__) || defined(__APPLE__)
static bool is_child(int argc, char **argv)
{
	return argc == 2 && !strcmp(argv[1], CHILD_COMMAND);
}
#else
// Other C libraries (musl) give a constructor no arguments.
static bool is_child(int argc, char **argv)
{
	(void)argc, (void)argv;
	char line[4096];
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, line, sizeof line);
	close(fd);
	char *zero = n > 0 ? memchr(line, 0, (size_t)n) : NULL;
	return zero && line + n == zero + 1 + sizeof CHILD_COMMAND && !memcmp(zero + 1, CHILD_COMMAND, sizeof CHILD_COMMAND);
}
#endif

// Before main, which is Go's.
__attribute__((constructor)) static void run_child(int argc, char **argv)
{
	if (is_child(argc, argv))
		be_child();
}
