// Package vm boots one VM and watches it: Launcher admits and launches, Machine
// is the result, Driver is what starts the process behind it.
//
// A VM has a private directory and a socket (layout.Machine). The directory's
// lock file is flocked on one open file that launcher and shim share, so the
// kernel frees it when both are gone, however they ended; whose lock is free is
// garbage, and whoever comes by removes it:
//
//	killed -9     the VM                       directory and socket
//	shim          dies with it                 removed by its launcher
//	VMM           is gone, its shim ends too   removed by its launcher
//	launcher      is ended by its shim         removed by the shim
//	  before the shim runs    never was        removed by the next launch
//	all of them   dies with them               removed by the next launch
//
// A kept VM (Machine.Release) has no launcher any more. Its shim removes what
// the others would; other processes find it by the record in its directory.
package vm
