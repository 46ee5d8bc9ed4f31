package contract

// The texts and examples of the functions in this file. The examples are the
// contract's.
const (
	createText = "Boot a fresh sandbox VM from an image and return its id. image is a name of the catalog (python, node, or one of the " +
		"operator's custom_images), not a registry reference. The sandbox lives until it is stopped or idle for its time."
	createExample = `{"image":"node","memory_mb":512,"idle_timeout_secs":600,"env":{"NODE_ENV":"production"}}`

	execText = "Run a program in a sandbox and return its output and exit code when it has ended. Give it as one line in cmd " +
		"(\"node -v\", split at spaces with quotes as in a shell), as cmd with args, or as argv. No shell is involved: pipes, " +
		"redirections and variables are plain words; sandbox::run with lang \"shell\" has them."
	execExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","cmd":"node","args":["/home/app/index.js"],` +
		`"env":{"NODE_ENV":"production"},"timeout_ms":300000}`

	stopText    = "Stop a sandbox and delete all of it. With wait:true the call returns once its VM is gone."
	listText    = "List the sandboxes of this adapter, oldest first."
	catalogText = "List the images that are known: the presets, then the operator's custom images. Only those on the " +
		"adapter's image_allowlist boot."
	infoText = "Name and version of this adapter, and the version of the sandbox contract that it keeps."

	runText = "Run code in a fresh sandbox in one call: create, write the code, run it, stop. lang names the interpreter: " +
		"node, python, shell, or the path of another one. The sandbox is stopped whatever happens, unless keep_sandbox is true."
	runExample = `{"image":"node","lang":"node","code":"console.log('hello world')","timeout_ms":300000}`
)

// CreateRequest asks for a sandbox.
type CreateRequest struct {
	Image           string   `json:"image" required:"true" doc:"The image to boot, by its name in the catalog: python, node, or a key of the adapter's custom_images. A registry reference works only where it is such a key. An unknown name is S100, which lists the allowed ones."`
	CPUs            *uint32  `json:"cpus" doc:"Virtual CPUs, at least 1; by default the adapter's default_cpus."`
	MemoryMB        *uint32  `json:"memory_mb" doc:"Memory in MiB, at least 64; by default the adapter's default_memory_mb."`
	Name            *string  `json:"name" doc:"A label for people, shown by sandbox::list. It identifies nothing and need not be unique."`
	Network         *bool    `json:"network" doc:"Whether the VM has a network; false by default. With one it reaches the internet and private networks, but nothing of this host: no address of it, and of its loopback only the ports that the operator opened (III_SANDBOX_HOST_PORTS), at the gateway. URLs of such ports in env lead there."`
	IdleTimeoutSecs *uint64  `json:"idle_timeout_secs" doc:"Stop the sandbox after so many seconds without activity; by default the adapter's default_idle_timeout_secs."`
	Env             EnvShape `json:"env" doc:"Environment of every program in the sandbox: an object or an array of KEY=value."`

	NetworkPolicy *NetworkPolicy  `json:"network_policy" extension:"true" doc:"What the sandbox reaches, where that is to be less than network:true gives. Needs network:true. It counts whether or not the schema shows it."`
	Publish       []PublishedPort `json:"publish" extension:"true" doc:"TCP ports of this host's 127.0.0.1 that lead into the sandbox, at most 64. Needs network:true, and an adapter with III_SANDBOX_EXTENSIONS=1 (else S001)."`
}

// NetworkPolicy narrows what a sandbox reaches. It is an extension.
type NetworkPolicy struct {
	Mode  string        `json:"mode" required:"true" doc:"restricted: what the rules of allow name and nothing else, not even DNS names that none of them has. open: as without a policy."`
	Allow []NetworkRule `json:"allow" doc:"The rules of a restricted policy, at most 512. None opens this host, link-local addresses, cloud metadata or multicast."`
}

// NetworkRule lets through one range of addresses or one name.
type NetworkRule struct {
	CIDR     *string  `json:"cidr" doc:"An IPv4 or IPv6 range, 203.0.113.0/24, or one address. Either this or name."`
	Name     *string  `json:"name" doc:"A DNS name, example.com; or all names below one, *.example.com, without itself. The sandbox reaches the addresses that it was answered for the name."`
	Ports    []string `json:"ports" doc:"Ports, \"443\", and ranges, \"8000-8100\"; none is every port."`
	Protocol *string  `json:"protocol" doc:"tcp or udp; both by default."`
}

// PublishedPort is a port of the host that leads into a sandbox. It is an
// extension.
type PublishedPort struct {
	HostPort  uint32 `json:"host_port" doc:"The port of 127.0.0.1; 0 takes one that is free, which the reply tells."`
	GuestPort uint32 `json:"guest_port" required:"true" doc:"The port in the sandbox. Nothing needs to listen there yet."`
}

// CreateResponse is the reply of create.
type CreateResponse struct {
	SandboxID string `json:"sandbox_id" doc:"The sandbox's UUID, for all other functions."`
	Image     string `json:"image" doc:"The image, as it was asked for."`

	Published []PublishedPort `json:"published,omitempty" extension:"true" doc:"The published ports; only where the request has some."`
}

// ExecRequest asks for a program in a sandbox.
type ExecRequest struct {
	SandboxID string   `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Cmd       string   `json:"cmd" doc:"The program; or, where it has a space in it and args is empty, a whole command line, which is split into words at spaces, with quotes and backslashes as in a shell. Pipes, redirections, && and variables are not interpreted."`
	Args      []string `json:"args" doc:"Arguments of cmd, one for each entry."`
	Argv      []string `json:"argv" doc:"Program and arguments in one array, taken as they are; cmd and args must be empty then."`
	Stdin     *string  `json:"stdin" doc:"Standard input, in base64; empty by default."`
	Env       EnvShape `json:"env" doc:"Environment for this program, over the sandbox's: an object or an array of KEY=value."`
	TimeoutMs *uint64  `json:"timeout_ms" doc:"Kill the program after so many milliseconds (S200). 300000 by default, 5 minutes, which is enough for most package installations; the adapter's max_exec_timeout_ms is the ceiling."`
	Workdir   *string  `json:"workdir" doc:"Directory to run in; / by default."`
}

// ExecResponse is how a program ended.
type ExecResponse struct {
	Stdout          string `json:"stdout" doc:"Standard output as text; what is not UTF-8 was replaced."`
	Stderr          string `json:"stderr" doc:"Standard error as text; what is not UTF-8 was replaced."`
	ExitCode        *int32 `json:"exit_code" doc:"Exit code; 128 + n when signal n ended the program, 127 not found, 126 not allowed."`
	TimedOut        bool   `json:"timed_out" doc:"Always false: a program that runs out of time is the error S200."`
	DurationMs      uint64 `json:"duration_ms" doc:"How long it took, in milliseconds."`
	Success         bool   `json:"success" doc:"Whether the exit code is 0."`
	StdoutTruncated bool   `json:"stdout_truncated" doc:"There was more standard output than the 1 MiB that is kept."`
	StderrTruncated bool   `json:"stderr_truncated" doc:"There was more standard error than the 1 MiB that is kept."`
}

// StopRequest asks for a sandbox's end.
type StopRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Wait      bool   `json:"wait" doc:"Return only when the VM is gone and what it held is free."`
}

// StopResponse is the reply of stop.
type StopResponse struct {
	SandboxID string `json:"sandbox_id" doc:"The UUID in its canonical form."`
	Stopped   bool   `json:"stopped" doc:"Always true."`
}

// ListRequest has no fields.
type ListRequest struct{}

func (ListRequest) fieldless() {}

// ListResponse is the reply of list.
type ListResponse struct {
	Sandboxes []SandboxSummary `json:"sandboxes"`
}

// SandboxSummary is one sandbox in a list.
type SandboxSummary struct {
	SandboxID      string  `json:"sandbox_id"`
	Name           *string `json:"name" doc:"The label given to create."`
	Image          string  `json:"image"`
	AgeSecs        uint64  `json:"age_secs" doc:"Seconds since its creation."`
	ExecInProgress bool    `json:"exec_in_progress" doc:"Whether a program runs. Another one may still be admitted: see exec_slots_free."`
	ExecInFlight   uint32  `json:"exec_in_flight" doc:"How many programs run."`
	ExecSlotsFree  uint32  `json:"exec_slots_free" doc:"How many more would be admitted before S003."`
	Stopped        bool    `json:"stopped" doc:"Whether its end is under way."`
}

// CatalogListRequest has no fields.
type CatalogListRequest struct{}

func (CatalogListRequest) fieldless() {}

// CatalogListResponse is the reply of catalog::list.
type CatalogListResponse struct {
	Images []CatalogEntry `json:"images" doc:"Presets first, in a fixed order, then the custom images sorted by name."`
}

// CatalogEntry is one image.
type CatalogEntry struct {
	Name   string           `json:"name"`
	OCIRef string           `json:"oci_ref"`
	Kind   CatalogEntryKind `json:"kind"`
}

// CatalogEntryKind is where an image's name comes from.
type CatalogEntryKind string

// The kinds of images.
const (
	PresetImage CatalogEntryKind = "preset"
	CustomImage CatalogEntryKind = "custom"
)

func (CatalogEntryKind) shape(*reflector) *schema {
	return &schema{OneOf: []*schema{
		{Type: "string", Enum: []string{string(PresetImage)}, Description: "Built into the adapter, the same everywhere."},
		{Type: "string", Enum: []string{string(CustomImage)}, Description: "From the operator's custom_images."},
	}}
}

// AdapterInfoRequest has no fields.
type AdapterInfoRequest struct{}

func (AdapterInfoRequest) fieldless() {}

// AdapterInfo is the reply of adapter::info.
type AdapterInfo struct {
	Adapter        string          `json:"adapter" doc:"The adapter's name."`
	AdapterVersion string          `json:"adapter_version" doc:"The version of its build."`
	Contract       ContractVersion `json:"contract" doc:"The sandbox contract that it keeps."`
}

// ContractVersion is a version of the contract: minor only adds.
type ContractVersion struct { //nolint:revive // the schema's definition has this name
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
}

// RunRequest asks for code to be run in a sandbox of its own.
type RunRequest struct {
	Image       string    `json:"image" required:"true" doc:"The image to boot, by its name in the catalog, as for sandbox::create."`
	Code        string    `json:"code" required:"true" doc:"The code. It is written to /tmp/run.<extension>, which the interpreter runs."`
	Lang        string    `json:"lang" required:"true" doc:"The interpreter: node, python or shell. Anything else is itself the interpreter's name or path in the image, and the code's file is /tmp/run.txt."`
	Files       []RunFile `json:"files" doc:"Text files to write before the code: modules, data, configuration."`
	Env         EnvShape  `json:"env" doc:"Environment of the program: an object or an array of KEY=value."`
	Stdin       *string   `json:"stdin" doc:"Standard input of the program, in base64; empty by default."`
	TimeoutMs   *uint64   `json:"timeout_ms" doc:"Kill the program after so many milliseconds (S200), 300000 by default. Pull and boot do not count."`
	KeepSandbox bool      `json:"keep_sandbox" doc:"Leave the sandbox running, also after a failure, and return its sandbox_id."`
}

// RunFile is a text file beside the code.
type RunFile struct {
	Path    string `json:"path" required:"true" doc:"Where in the sandbox; missing directories are made."`
	Content string `json:"content" required:"true" doc:"The text. For binary or large files use sandbox::create and sandbox::fs::write."`
}

// RunResponse is the reply of run.
type RunResponse struct {
	ExecResponse
	SandboxID *string `json:"sandbox_id,omitempty" doc:"The sandbox, where keep_sandbox was true."`
}
