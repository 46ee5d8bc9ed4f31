package archtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// arrows is the import graph of the project: a package on the left may import,
// outside its tests, those on the right and no other of ours. Names without a
// top-level directory are below internal/. A change of the code that needs a new
// arrow adds it here, with the reason where it is not plain; an arrow or a
// package that is gone has to go here too.
const arrows = `
# Generated.
api/guest/v1 api/shim/v1 ->

# Leaves.
fault layout cleanup flock proc agentlink egress erofs iii krun rpcbuffers strictjson agent/rexp ->

# Data and single outside things. A boot spec carries the policy of a network.
bootspec   -> egress
catalog    -> fault
# catalog for the checks of the operator's images.
config     -> catalog strictjson
contract   -> fault strictjson
# layout for its check that a directory is the user's own.
imagestore -> cleanup erofs flock layout
vmassets   -> flock layout
netstack   -> cleanup egress
# agentlink for the version of the protocol.
guest      -> agentlink api/guest/v1 fault

# The VM, host side. vm finds a kept VM's shim by its identity, from proc.
vm             -> api/shim/v1 bootspec cleanup egress flock guest layout proc
vm/shimdriver  -> bootspec cleanup layout proc vm vmassets
shim           -> agentlink api/guest/v1 api/shim/v1 bootspec cleanup flock layout netstack
# agentlink for the names of the console ports, layout for that of the link's
# socket, krun for the types of its calls alone. QEMU must die with the shim and
# in no other way, so proc, whose children outlive calls, is not for it.
shim/qemu      -> agentlink bootspec cleanup shim
shim/libkrun   -> agentlink bootspec cleanup krun layout shim
# It puts a shim and an agent together in one process.
vm/vmtest      -> agent agent/procs agentlink bootspec egress guest imagestore layout shim test/netprobe/wire vm vmassets

# The core and its surface. cli is where progress, results and findings of each
# become text. sandbox takes the most that an environment may have from bootspec.
sandbox -> bootspec catalog cleanup egress fault guest imagestore vm
# In serve it puts adapter, engine client and core together.
cli     -> adapter catalog config contract egress fault guest iii imagestore layout sandbox selftest vm vmassets
# doctor's VM.
selftest -> cleanup erofs guest layout vm
# catalog for the kinds of images, config for what it hands to the core.
adapter -> catalog config contract egress fault iii sandbox

# The guest's side.
agent/procs ->
agent/fsops -> agent/rexp fault
agent/boot  -> agentlink bootspec
agent       -> agent/fsops agent/procs agentlink api/guest/v1 fault

# Programs. krun-shim can also boot a spec from a file, by hand: then it fills in
# what the launcher would have.
cmd/adapter     -> cli layout rpcbuffers vm vm/shimdriver
cmd/krun-shim   -> agentlink bootspec cleanup krun layout rpcbuffers shim shim/libkrun shim/qemu vmassets
cmd/guest-agent -> agent agent/boot agent/procs agentlink rpcbuffers

# Programs of the build.
build/docs   -> contract fault
build/images -> cleanup flock layout proc
build/upper  ->

# The benchmark.
test/bench/sequence ->
test/bench/probe    -> test/bench/sequence
# Through the engine in memory, beside Node; bootspec, shim and vmtest for a fake in
# the place of krun-shim.
test/bench          -> bootspec cleanup egress guest iii iii/iiitest imagestore layout shim test/bench/sequence test/netprobe/wire test/nodesdk vm vm/shimdriver vm/vmtest vmassets

# What tests and the benchmark run in guests, to look at their network.
test/netprobe/wire ->
test/netprobe      -> test/netprobe/wire

# The engine in memory, in tests and as a program of its own.
iii/iiitest     -> iii
test/cmd/engine -> iii iii/iiitest

# The real clients, and the tests in which they use everything.
test/sdk       -> flock
test/nodesdk   -> test/sdk
test/pythonsdk -> test/sdk
test/rustsdk   -> test/sdk
test/clients   ->

# The lab, where libkrun's guests run on any host, and what is measured in it.
test/lab       -> layout test/l1 vmassets
test/l1        -> vmassets
# In that machine.
test/l1/anchor ->
test/bench-lab -> bootspec cleanup guest imagestore layout test/l1 vm vm/shimdriver vmassets

archtest ->
`

// testOnly are the packages that only tests, and programs of test/, may import.
func testOnly() []string {
	return []string{"internal/vm/vmtest", "internal/iii/iiitest", "internal/archtest"}
}

// grpcImporters are the packages, by prefix, that may import grpc: the two ends
// of each connection, and what puts them together. Everything else sees our own
// types, so that a status code never travels further than its border.
func grpcImporters() []string {
	return []string{"api/", "cmd/", "internal/agent", "internal/guest", "internal/rpcbuffers", "internal/shim", "internal/vm", "internal/vm/vmtest"}
}

// bans are what a program must not link, with everything it imports.
func bans() []ban {
	const ours = modulePath + "/internal/"
	return []ban{
		{
			program: "cmd/adapter",
			reason:  "the adapter is one cgo-free binary; a VMM and its network run in the shim's process, where they may crash",
			never: []string{
				ours + "krun", ours + "netstack", ours + "shim", ours + "agent/", ours + "agent",
				"gvisor.dev/gvisor", "github.com/containers/gvisor-tap-vsock",
			},
		},
		{
			program: "cmd/krun-shim",
			reason:  "one shim runs for each VM: it stays small and knows neither images nor the engine",
			never: []string{
				ours + "imagestore", ours + "sandbox", ours + "worker", ours + "iii", ours + "cli", ours + "agent/", ours + "agent",
				"github.com/google/go-containerregistry",
			},
		},
		{
			program: "cmd/guest-agent",
			reason:  "the agent is in every guest's memory and meets hostile code: it holds nothing of the host's side",
			never: []string{
				ours + "vm", ours + "guest", ours + "shim", ours + "imagestore", ours + "sandbox", ours + "netstack", ours + "krun",
				"gvisor.dev/gvisor", "github.com/google/go-containerregistry", "github.com/spf13/cobra",
			},
		},
	}
}

// shared is what the adapter and the agent may both link of ours: the documents
// and protocols between them.
func shared() []string {
	return []string{"api/guest/v1", "internal/agentlink", "internal/bootspec", "internal/egress", "internal/fault", "internal/rpcbuffers"}
}

type ban struct {
	program string
	reason  string
	never   []string // import paths, and with them what lies below
}

func TestArrows(t *testing.T) {
	t.Parallel()
	table, err := parseArrows(arrows)
	if err != nil {
		t.Fatal(err)
	}
	graph := map[string][]string{}
	for _, platform := range platforms() {
		for _, pkg := range listOurs(t, platform) {
			graph[pkg.name()] = append(graph[pkg.name()], pkg.ourImports()...)
		}
	}
	if len(graph) < 10 {
		t.Fatalf("go list names only %d packages of ours", len(graph))
	}
	report(t, compareArrows(table, graph))
}

// compareArrows tells in which way the imports of graph are not those of table.
func compareArrows(table, graph map[string][]string) []string {
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(graph)) {
		allowed, ok := table[name]
		if !ok {
			faults = append(faults, fmt.Sprintf("%s is missing from the table of arrows", name))
			continue
		}
		used := slices.Compact(slices.Sorted(slices.Values(graph[name])))
		for _, target := range used {
			switch {
			case slices.Contains(testOnly(), target) && !slices.Contains(testOnly(), name) && !strings.HasPrefix(name, "test/"):
				faults = append(faults, fmt.Sprintf("%s imports %s, which is for tests alone", name, target))
			case !slices.Contains(allowed, target):
				faults = append(faults, fmt.Sprintf("%s imports %s, an arrow that the table does not have", name, target))
			}
		}
		for _, target := range allowed {
			if !slices.Contains(used, target) {
				faults = append(faults, fmt.Sprintf("%s does not import %s any more: take the arrow out of the table", name, target))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(table)) {
		if _, ok := graph[name]; !ok {
			faults = append(faults, fmt.Sprintf("there is no package %s: take it out of the table of arrows", name))
		}
	}
	return faults
}

// parseArrows reads a table as arrows is one.
func parseArrows(text string) (map[string][]string, error) {
	full := func(name string) string {
		switch top, _, _ := strings.Cut(name, "/"); top {
		case "api", "build", "cmd", "test":
			return name
		}
		return "internal/" + name
	}
	table := map[string][]string{}
	for number, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if strings.TrimSpace(line) == "" {
			continue
		}
		from, to, ok := strings.Cut(line, "->")
		if !ok {
			return nil, fmt.Errorf("line %d has no arrow: %q", number+1, line)
		}
		targets := []string{}
		for _, name := range strings.Fields(to) {
			targets = append(targets, full(name))
		}
		for _, name := range strings.Fields(from) {
			if _, twice := table[full(name)]; twice {
				return nil, fmt.Errorf("line %d: %s has a line already", number+1, name)
			}
			table[full(name)] = targets
		}
	}
	return table, nil
}

func TestWhatProgramsLink(t *testing.T) {
	t.Parallel()
	deps := programDeps(t)
	for _, ban := range bans() {
		linked, ok := deps[ban.program]
		if !ok {
			t.Errorf("there is no program %s", ban.program)
			continue
		}
		for _, fault := range ban.broken(linked) {
			t.Error(fault)
		}
	}
}

// broken tells which of the packages linked the ban forbids.
func (b ban) broken(linked []string) []string {
	var faults []string
	for _, path := range linked {
		for _, never := range b.never {
			if below(path, never) {
				faults = append(faults, fmt.Sprintf("%s links %s: %s", b.program, path, b.reason))
			}
		}
	}
	return faults
}

func TestHostAndGuestMeetInTheirDocumentsAlone(t *testing.T) {
	t.Parallel()
	deps := programDeps(t)
	for _, path := range deps["cmd/guest-agent"] {
		name, ours := strings.CutPrefix(path, modulePath+"/")
		if ours && slices.Contains(deps["cmd/adapter"], path) && !slices.Contains(shared(), name) {
			t.Errorf("%s is linked by both cmd/adapter and cmd/guest-agent: the two sides share %v alone", name, shared())
		}
	}
}

func TestGRPCStaysAtTheBorders(t *testing.T) {
	t.Parallel()
	for _, platform := range platforms() {
		for _, pkg := range listOurs(t, platform) {
			if fault := grpcFault(pkg.name(), pkg.Imports); fault != "" {
				t.Error(fault)
			}
		}
	}
}

func grpcFault(name string, imports []string) string {
	for _, importer := range grpcImporters() {
		if name == importer || strings.HasSuffix(importer, "/") && strings.HasPrefix(name, importer) {
			return ""
		}
	}
	for _, path := range imports {
		if below(path, "google.golang.org/grpc") {
			return fmt.Sprintf("%s imports %s: only %v may", name, path, grpcImporters())
		}
	}
	return ""
}

// Programs that must build without a C compiler depend on no package that has
// cgo files, the standard library's aside, which have a pure Go form each.
func TestCgoFreePrograms(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"cmd/adapter", "cmd/guest-agent"} {
		for _, pkg := range goList(t, linux, "-deps", "./"+program) {
			if !pkg.Standard && len(pkg.CgoFiles) > 0 {
				t.Errorf("%s links %s, which needs cgo (%s): it must build with CGO_ENABLED=0", program, pkg.ImportPath, pkg.CgoFiles[0])
			}
		}
	}
}

// below reports whether the import path is root or lies below it.
func below(path, root string) bool {
	rest, ok := strings.CutPrefix(path, root)
	return ok && (rest == "" || rest[0] == '/' || strings.HasSuffix(root, "/"))
}

func report(t *testing.T, faults []string) {
	t.Helper()
	for _, fault := range faults {
		t.Error(fault)
	}
}
