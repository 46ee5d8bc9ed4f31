package krun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"unicode"
)

// ChildCommand is an argument that, alone, makes a program that has this package and
// cgo the process of a VM, before its own main: it makes the calls of a
// [Sequence] that it reads from its standard input.
const ChildCommand = "__libkrun"

// What the child is to its parent, as in child.c.
const (
	// ReportFile is the file descriptor on which the child says why there is no VM.
	ReportFile = 5
	// StatusRefused is its exit status then. A guest may have its VM end with it
	// too, without a report.
	StatusRefused = 125
	// MaxReport is how long a report can be, in bytes.
	MaxReport = 4096
)

// Sequence is what a child process does to become a VM: calls of libkrun, and
// what has to come before them. Devices get their numbers in the guest in the
// order of the calls; on x86-64 there can be 11 of them. The zero value is empty.
// It is not for concurrent use.
//
// The first call that fails is the last one, and the child reports it. The child
// ends, by SIGKILL, when its standard input is closed after Watch.
type Sequence struct{ orders []order }

type order struct {
	name string
	args []arg
	// refusal is what it means when the order fails; empty for what libkrun's
	// answer means.
	refusal string
}

// arg has an int, a bool, a string, strings or a hardware address.
type arg struct {
	name  string
	value any
}

func (s *Sequence) add(name string, args ...arg) {
	s.orders = append(s.orders, order{name: name, args: args})
}

// Confine restricts the process to the Landlock ruleset of a file descriptor, and
// to reading /proc/self. Linux only, and first.
func (s *Sequence) Confine(ruleset int, flags uint32) {
	s.add("confine", arg{"ruleset", ruleset}, arg{"flags", int(flags)})
}

// Watch has the process end with its standard input.
func (s *Sequence) Watch() { s.add("watch") }

// Load loads libkrun from the file library. firmware is the libkrunfw that goes
// with it, loaded before, since libkrun itself would look only where the system
// has its libraries; empty leaves it to libkrun. Both are absolute paths, or bare
// file names for the system's loader to find.
func (s *Sequence) Load(library, firmware string) {
	s.add("load", arg{"library", library}, arg{"firmware", firmware})
}

// InitLog sends libkrun's log to a file descriptor, without colours and whatever
// the environment says. At most once: libkrun aborts on a second time.
func (s *Sequence) InitLog(fd int, level LogLevel) {
	const never, ignoreEnvironment = 2, 1
	s.add("init_log", arg{"fd", fd}, arg{"level", int(level)}, arg{"style", never}, arg{"options", ignoreEnvironment})
}

// NeedFeature refuses a library that was built without a feature, with words for
// the user. One before 1.17.3 cannot be asked, and is taken.
func (s *Sequence) NeedFeature(feature Feature, lacking string) {
	s.add("has_feature", arg{"feature", int(feature)})
	s.orders[len(s.orders)-1].refusal = lacking
}

// Describe has the child tell what the library can do, and end; see Described.
func (s *Sequence) Describe() { s.add("describe") }

// CreateContext begins the configuration that all that follows is about.
func (s *Sequence) CreateContext() { s.add("create_ctx") }

// SetVMConfig sets the number of virtual CPUs (the kernel of libkrunfw uses 16
// at most) and the memory in MiB. Memory that does not hold the kernel, about
// 40 MiB, makes StartEnter abort.
func (s *Sequence) SetVMConfig(cpus, memoryMiB int) {
	s.add("set_vm_config", arg{"cpus", cpus}, arg{"memory_mib", memoryMiB})
}

// SetNestedVirt lets the guest run VMs.
func (s *Sequence) SetNestedVirt(on bool) { s.add("set_nested_virt", arg{"on", on}) }

// SetRoot makes a directory of the host the guest's root. The guest may change
// what is in it. A missing directory is no error here or at the start: the guest
// fails to boot.
func (s *Sequence) SetRoot(dir string) { s.add("set_root", arg{"dir", dir}) }

// AddDisk3 adds a disk; id is at most 20 bytes. sync says what a guest's flush
// does; direct goes around the host's cache, for which the image has to be
// aligned. The file is opened when the VM starts. Since 1.17, and only with
// FeatureBlk; else ENOSYS.
func (s *Sequence) AddDisk3(id, file string, format DiskFormat, readOnly, direct bool, sync SyncMode) {
	s.add("add_disk3", arg{"id", id}, arg{"file", file}, arg{"format", int(format)},
		arg{"read_only", readOnly}, arg{"direct", direct}, arg{"sync", int(sync)})
}

// DisableImplicitConsole leaves out the console on the process's own standard
// files, which the guest would otherwise have.
func (s *Sequence) DisableImplicitConsole() { s.add("disable_implicit_console") }

// AddVirtioConsoleDefault adds a console on file descriptors; NoFile for none.
// They are put into non-blocking mode. A bad one makes StartEnter abort.
func (s *Sequence) AddVirtioConsoleDefault(in, out, err int) {
	s.add("add_virtio_console_default", arg{"in", in}, arg{"out", out}, arg{"err", err})
}

// AddVirtioConsoleMultiport adds a console of named ports. One that gets no port
// makes StartEnter abort.
func (s *Sequence) AddVirtioConsoleMultiport() { s.add("add_virtio_console_multiport") }

// AddConsolePortInOut adds a port to the multiport console that was added last:
// in is what the guest reads, out what it writes to; NoFile for neither. They are
// put into non-blocking mode. A bad one makes StartEnter abort.
func (s *Sequence) AddConsolePortInOut(name string, in, out int) {
	s.add("add_console_port_inout", arg{"name", name}, arg{"in", in}, arg{"out", out})
}

// DisableImplicitVsock leaves out the vsock device that would lend the guest the
// host's network where the VM has no network device.
func (s *Sequence) DisableImplicitVsock() { s.add("disable_implicit_vsock") }

// AddVsock adds the vsock device; see VsockPlain. The implicit one has to be
// left out before.
func (s *Sequence) AddVsock(tsi int) { s.add("add_vsock", arg{"tsi", tsi}) }

// AddVsockPort2 ties a vsock port to a unix socket. With listen, libkrun makes
// the socket and passes connections on to the guest; without, it connects to the
// socket when the guest dials the port of CID 2. A path that is too long (107
// bytes, 103 on macOS) is not refused, but does not work. A relative one counts
// from the working directory at the time of the connection.
func (s *Sequence) AddVsockPort2(port int, file string, listen bool) {
	s.add("add_vsock_port2", arg{"port", port}, arg{"file", file}, arg{"listen", listen})
}

// AddNetUnixStream adds a network device on a stream socket, each frame behind
// its length in four bytes. features are virtio-net's; 0 is understood by every
// peer. Needs FeatureNet, else ENOSYS or EINVAL.
func (s *Sequence) AddNetUnixStream(fd int, mac [6]byte, features, flags int) {
	s.add("add_net_unixstream", arg{"fd", fd}, arg{"mac", mac}, arg{"features", features}, arg{"flags", flags})
}

// SetExec names the program that the guest runs, as a path in its root, with its
// arguments (without the name) and environment. All of it travels on the
// kernel's command line, unescaped and for every program of the guest to read:
// 2048 bytes in all, 32 arguments and 32 variables, printable ASCII without
// quotes; StartEnter aborts on some of the rest. A nil env is an empty one.
func (s *Sequence) SetExec(program string, args, env []string) {
	s.add("set_exec", arg{"program", program}, arg{"args", args}, arg{"env", env})
}

// StartEnter runs the VM. When the guest ends, the process ends with _exit. The
// status is what the guest set, else 0, also where its kernel died; 1 when a
// virtual CPU failed; 128 and more is a crash of the VMM. SIGABRT means that
// libkrun did not like the configuration. It sets the umask to 0.
func (s *Sequence) StartEnter() { s.add("start_enter") }

// String has one order a line.
func (s *Sequence) String() string {
	var lines strings.Builder
	for _, o := range s.orders {
		lines.WriteString(o.name)
		for _, a := range o.args {
			format := " %s=%v"
			if _, list := a.value.([]string); list {
				format = " %s=%q"
			}
			_, _ = fmt.Fprintf(&lines, format, a.name, a.value)
		}
		lines.WriteByte('\n')
	}
	return lines.String()
}

// WriteTo writes the list that the child reads: its length as four bytes,
// big-endian, and each name and argument as text with a zero byte behind. A
// string with a zero byte in it is refused, and nothing written.
func (s *Sequence) WriteTo(w io.Writer) (int64, error) {
	list := make([]byte, 4)
	for _, o := range s.orders {
		list = append(append(list, o.name...), 0)
		for _, a := range o.args {
			for _, text := range a.texts() {
				if strings.ContainsRune(text, 0) {
					return 0, fmt.Errorf("%s: %s has a zero byte", o.name, a.name)
				}
				list = append(append(list, text...), 0)
			}
		}
	}
	binary.BigEndian.PutUint32(list, uint32(len(list)-4))
	n, err := w.Write(list)
	return int64(n), err
}

func (a arg) texts() []string {
	switch v := a.value.(type) {
	case string:
		return []string{v}
	case []string:
		return append([]string{strconv.Itoa(len(v))}, v...)
	case [6]byte:
		return strings.Fields(strings.Trim(fmt.Sprint(v), "[]"))
	case bool:
		if v {
			return []string{"1"}
		}
		return []string{"0"}
	default:
		return []string{fmt.Sprint(v)}
	}
}

// Refusal is what the child's report means, which is what came from ReportFile
// until its end; nil for an empty one, which is that of a VM. An answer of
// libkrun is an *Error.
func (s *Sequence) Refusal(report []byte) error {
	if len(report) == 0 {
		return nil
	}
	line, _, _ := bytes.Cut(report, []byte("\n"))
	fields := strings.SplitN(string(line), " ", 4)
	if len(fields) != 4 {
		return fmt.Errorf("its report is %q", line)
	}
	at, atErr := strconv.Atoi(fields[1])
	result, resultErr := strconv.Atoi(fields[2])
	if err := errors.Join(atErr, resultErr); err != nil || at < 0 || at > len(s.orders) {
		return fmt.Errorf("its report is %q", line)
	}
	var o order
	if at < len(s.orders) {
		o = s.orders[at]
	}
	// The words may be those of a VMM that its guest has taken over.
	switch what, words := fields[0], strings.Map(printable, fields[3]); {
	case what == "firmware":
		return fmt.Errorf("load libkrunfw: %s", words)
	case what == "library":
		return fmt.Errorf("load libkrun: %s", words)
	case what == "lacking" && o.name == "load":
		return fmt.Errorf("load libkrun: %v has no %s: want libkrun 1.17 or a later 1.x", o.args[0].value, words)
	case what == "call":
		return o.failure(syscall.Errno(-result))
	default:
		return fmt.Errorf("the list of calls, at number %d (%s): %s", at, o.name, words)
	}
}

// printable leaves out what may not be in a line of text.
func printable(r rune) rune {
	if !unicode.IsPrint(r) {
		return -1
	}
	return r
}

// failure is what it means that the order answered with errno.
func (o order) failure(errno syscall.Errno) error {
	switch {
	case o.refusal != "":
		return errors.New(o.refusal)
	case o.name == "confine":
		return fmt.Errorf("confine the VMM with Landlock: %w: set III_SHIM_LANDLOCK=off to do without", errno)
	case o.name == "watch":
		return fmt.Errorf("watch the VMM's standard input: %w", errno)
	default:
		return newError("krun_"+o.name, errno)
	}
}
