// A library in libkrun's place, whose guest does what the VM's id says. Its host
// end is real: the descriptors and the socket that it was given.
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int console, env;
static char link_path[108], root_path[4096], upper_path[4096];

static bool peeks(void) { return !strcmp(getenv("HOSTNAME"), "peek"); }

int32_t krun_init_log(int fd, uint32_t level, uint32_t style, uint32_t options) { return fd == 2 && level == 2 && style == 2 && options == 1 ? 0 : -5; }
#ifndef BEFORE_1_17_3
int32_t krun_has_feature(uint64_t feature) { return feature < 2 && (!getenv("HOSTNAME") || strcmp(getenv("HOSTNAME"), "no-disks")); }
#endif
int32_t krun_create_ctx(void) { return 3; }
int32_t krun_set_vm_config(uint32_t ctx, uint8_t cpus, uint32_t mib) { return ctx == 3 && cpus == 2 && mib == 512 ? 0 : -5; }
int32_t krun_disable_implicit_console(uint32_t ctx) { return ctx == 3 ? 0 : -5; }
int32_t krun_disable_implicit_vsock(uint32_t ctx) { return ctx == 3 ? 0 : -5; }
int32_t krun_add_vsock(uint32_t ctx, uint32_t tsi) { return ctx == 3 && tsi == 0 ? 0 : -5; }
int32_t krun_add_virtio_console_multiport(uint32_t ctx) { return ctx == 3 ? 9 : -5; }

int32_t krun_set_root(uint32_t ctx, const char *dir)
{
	snprintf(root_path, sizeof root_path, "%s", dir);
	return ctx == 3 && *dir == '/' ? 0 : -5;
}

int32_t krun_add_disk3(uint32_t ctx, const char *id, const char *file, uint32_t format, bool readonly, bool direct, uint32_t sync)
{
	bool lower = !strcmp(id, "lower") && !strcmp(file, "/images/lower.erofs") && readonly;
	bool upper = !strcmp(id, "upper") && !strcmp(file, "/state/vm-1/upper.ext4") && !readonly;
	if (!readonly)
		snprintf(upper_path, sizeof upper_path, "%s", file);
	return ctx == 3 && (lower || upper || peeks()) && !format && !direct && !sync ? 0 : -5;
}

int32_t krun_add_vsock_port2(uint32_t ctx, uint32_t port, const char *file, bool listen)
{
	snprintf(link_path, sizeof link_path, "%s", file);
	return ctx == 3 && port == 1024 && !listen ? 0 : -5;
}

int32_t krun_add_virtio_console_default(uint32_t ctx, int in, int out, int err)
{
	console = out;
	return ctx == 3 && in == -1 && out == err ? 0 : -5;
}

int32_t krun_add_console_port_inout(uint32_t ctx, uint32_t number, const char *name, int in, int out)
{
	env = in;
	return ctx == 3 && number == 9 && !strcmp(name, "iii.env") && write(out, "x", 1) == 1 ? 0 : -5;
}

int32_t krun_add_net_unixstream(uint32_t ctx, const char *file, int fd, uint8_t *mac, uint32_t features, uint32_t flags)
{
	static const uint8_t want[6] = {0x5a, 0x94, 0xef, 0x18, 0x00, 0x02};
	return ctx == 3 && !file && !memcmp(mac, want, 6) && !features && !flags && write(fd, "frame", 5) == 5 ? 0 : -5;
}

int32_t krun_set_exec(uint32_t ctx, const char *file, const char **argv, const char **envp)
{
	return ctx == 3 && !strcmp(file, "/agent") && !argv[0] && !strcmp(envp[0], "KRUN_INIT_PID1=1") && !strncmp(envp[1], "initcall_blacklist=", 19) ? 0 : -5;
}

// dial is what the agent does first.
static void dial(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	strcpy(address.sun_path, link_path);
	int link = socket(AF_UNIX, SOCK_STREAM, 0);
	if (connect(link, (struct sockaddr *)&address, sizeof address))
		_exit(80);
	char byte;
	while (read(env, &byte, 1) == 1)
		if (write(link, &byte, 1) != 1)
			_exit(81);
	if (write(link, "\n", 1) != 1)
		_exit(82);
	while (read(link, &byte, 1) == 1)
		;
}

static void tell(const char *what, int result)
{
	dprintf(console, ";%s: %s", what, result < 0 ? "no" : "ok");
}

// peek tells what a confined VMM can reach.
static void peek(void)
{
	char made[4200];
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	tell("write the upper", open(upper_path, O_RDWR));
	tell("read the spec", open("spec.json", O_RDONLY));
	snprintf(made, sizeof made, "%s/made", root_path);
	tell("make a file in the root", open(made, O_CREAT | O_WRONLY, 0600));
	snprintf(made, sizeof made, "%s/agent", root_path);
	tell("read the agent", open(made, O_RDONLY));
	tell("read the system", open("/etc/passwd", O_RDONLY));
	tell("write the system", open("/etc/passwd", O_WRONLY));
	tell("reopen a file of its own", open("/proc/self/fd/0", O_RDONLY));
	tell("read another process", open("/proc/1/cmdline", O_RDONLY));
	tell("bind a TCP port", bind(socket(AF_INET, SOCK_STREAM, 0), (struct sockaddr *)&any, sizeof any));
}

extern char **environ;

int32_t krun_start_enter(uint32_t ctx)
{
	const char *act = getenv("HOSTNAME");
	if (ctx != 3)
		return -5;
	dprintf(console, "%s", act);
	if (*act >= '0' && *act <= '9')
		_exit(atoi(act));
	if (!strcmp(act, "refuse"))
		return -22;
	if (!strcmp(act, "world")) {
		char dir[4096];
		for (char **e = environ; *e; e++)
			dprintf(console, ";%s", *e);
		dprintf(console, ";%s", getcwd(dir, sizeof dir));
	}
	if (!strcmp(act, "dial"))
		dial();
	if (peeks())
		peek();
	if (!strcmp(act, "kill"))
		raise(SIGKILL);
	if (!strcmp(act, "crash"))
		raise(SIGBUS);
	if (!strcmp(act, "abort"))
		abort();
	if (!strcmp(act, "fork") && !fork()) {
		char byte;
		while (read(0, &byte, 1) > 0)
			;
	}
	while (!strcmp(act, "hang"))
		pause();
	_exit(0);
}
