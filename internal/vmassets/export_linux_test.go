package vmassets

// KVMUsable is HardwareVirtualization with the files to look at.
func KVMUsable(device, cpuinfo, arch string) error { return kvmUsable(device, cpuinfo, arch) }
