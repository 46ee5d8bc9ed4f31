package l1

// Seams of the tests, which are in a package of their own.

var (
	FindStore      = findStore
	Injection      = injection
	Mend           = mend
	AddressOf      = addressOf
	Nothing        = nothing
	ErrUnknownQEMU = errUnknownQEMU
	LastLines      = lastLines
)

const InjectionStore = injectionStore
