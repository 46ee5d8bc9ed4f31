//go:build cgo && (linux || darwin)

package krun

// #cgo LDFLAGS: -ldl
// #include "api.h"
import "C"

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"
)

// Library is a loaded libkrun. It stays loaded for the life of the process: it
// has threads and handlers of its own. Its methods may be called concurrently.
type Library struct {
	path, firmware string
	// In C's memory, for the life of the process.
	api     *C.struct_api
	missing []string
}

// Open loads libkrun from the file library. firmware is the libkrunfw that goes
// with it, loaded before, since libkrun itself would look only where the system
// has its libraries; empty leaves it to libkrun, which finds out only when a VM
// is started. Both are absolute paths, or bare file names for the system's loader
// to find.
//
// The error has the loader's words and names the file; a library that lacks a
// function which 1.17 has is refused, and the function named. From then on an
// abort ends the process by SIGABRT without a word from Go.
func Open(library, firmware string) (*Library, error) {
	for _, path := range []string{library, firmware} {
		if path != filepath.Base(path) && !filepath.IsAbs(path) && path != "" {
			return nil, fmt.Errorf("load %s: it is not an absolute path", path)
		}
	}
	if firmware != "" {
		if _, err := load(firmware, C.RTLD_NOW|C.RTLD_GLOBAL); err != nil {
			return nil, fmt.Errorf("load libkrunfw: %w", err)
		}
	}
	handle, err := load(library, C.RTLD_NOW)
	if err != nil {
		return nil, fmt.Errorf("load libkrun: %w", err)
	}
	C.abort_plainly()
	lib := &Library{path: library, firmware: firmware, api: (*C.struct_api)(C.calloc(1, C.sizeof_struct_api))}
	var lacking []string
	for i := range C.symbol_count() {
		if C.bind_symbol(lib.api, handle, i) {
			continue
		}
		name := C.GoString(C.symbol_name(i))
		if C.symbol_required(i) {
			lacking = append(lacking, name)
		} else {
			lib.missing = append(lib.missing, name)
		}
	}
	if len(lacking) > 0 {
		return nil, fmt.Errorf("load libkrun: %s has no %s: want libkrun 1.17 or a later 1.x", library, strings.Join(lacking, ", "))
	}
	return lib, nil
}

// load is dlopen. The handle is never closed.
func load(path string, flags C.int) (unsafe.Pointer, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	// Each thread has an error of its own.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	handle := C.dlopen(name, flags)
	if handle == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	return handle, nil
}

// Path is the file that the library was loaded from, as Open was told.
func (l *Library) Path() string { return l.path }

// Firmware is libkrunfw's file, as Open was told.
func (l *Library) Firmware() string { return l.firmware }

// Missing lists the optional functions that the library lacks, in no meaningful
// order: what came with 1.18 or later, or was left out of the build.
func (l *Library) Missing() []string { return l.missing }

// Has tells whether the build has a feature; false also where it does not know
// of it.
func (l *Library) Has(feature Feature) bool {
	return C.call_has_feature(l.api, C.uint64_t(feature)) == 1
}

// MaxCPUs is how many virtual CPUs the host lets a VM have. It needs no context
// but, on Linux, /dev/kvm.
func (l *Library) MaxCPUs() (int, error) {
	return value("krun_get_max_vcpus", C.call_get_max_vcpus(l.api))
}

// CanNest tells whether guests may run VMs of their own.
func (l *Library) CanNest() (bool, error) {
	n, err := value("krun_check_nested_virt", C.call_check_nested_virt(l.api))
	return n == 1, err
}

// InitLog sends libkrun's log to the file descriptor fd, without colours and
// whatever the environment says. Call it at most once in a process, before any
// other call: libkrun aborts on a second time.
func (l *Library) InitLog(fd int, level LogLevel) error {
	const never, ignoreEnvironment = 2, 1
	return check("krun_init_log", C.call_init_log(l.api, C.int(fd), C.uint32_t(level), never, ignoreEnvironment))
}

// NewContext begins a configuration. Free gives it up.
func (l *Library) NewContext() (*Context, error) {
	id, err := value("krun_create_ctx", C.call_create_ctx(l.api))
	if err != nil {
		return nil, err
	}
	return &Context{api: l.api, id: C.uint32_t(id)}, nil
}

// check makes an error of a negative result.
func check(call string, result C.int32_t) error {
	if result < 0 {
		return newError(call, int32(result))
	}
	return nil
}

// value is check for calls that answer with a number.
func value(call string, result C.int32_t) (int, error) {
	return int(result), check(call, result)
}
