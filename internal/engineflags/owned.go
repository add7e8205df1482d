package engineflags

import "strings"

// Owned is a flag that users cannot give to an engine that dpserve starts: dpserve sets it, or an engine with
// it would not work. Both commands and files are read by this one table.
type Owned struct {
	// what dpserve does instead; "": it writes the flag itself
	Why string
	// what to write in an app.yaml
	InFile string
	// the flag of `dpserve serve` that says the same; "": there is none
	Flag string
	// why `dpserve serve` may leave the flag out and go on; "": it refuses the flag
	LeftOut string
	// what to write with `dpserve serve` instead, if it refuses the flag
	OnServe string
	// a file may have the flag, as long as it does not turn it off
	OnlyOn bool
}

const (
	ownRanks = "dpserve hands out ranks and addresses; write data_parallel.dp_size and " +
		"data_parallel.coupling"
	ownPlaces = "dpserve places the ranks; write resources and placement_group_strategy"
	leaveOut  = "leave it out"

	anyRank    = "dpserve hands out the ranks: leave it out"
	oneMachine = "`dpserve serve` runs all ranks on this machine: leave it out; `dpserve start`, `join` " +
		"and `deploy` run them on several"
	plainHTTP = "dpserve speaks HTTP with its engines, on 127.0.0.1: leave it out; TLS belongs in front of " +
		"the endpoint"
)

// What several flags have in common.
//
//nolint:gochecknoglobals // constants
var (
	ownModel    = Owned{InFile: "write model.source", Flag: "model"}
	ownAdapters = Owned{InFile: "write model.adapters", Flag: "lora-modules"}
	ownSize     = Owned{InFile: "write data_parallel.dp_size", Flag: "dp-size"}
	ownAddress  = Owned{InFile: ownPlaces, LeftOut: "dpserve hands out addresses"}
	ownBalancer = Owned{InFile: ownRanks, LeftOut: "dpserve is the load balancer"}
	ownNodes    = Owned{InFile: ownPlaces, OnServe: oneMachine}
	ownPort     = Owned{
		Why: "dpserve takes the ports of engines from the node's --port-range", InFile: leaveOut,
		LeftOut: "dpserve hands out ports; see --port-range",
	}
	ownDevices = Owned{
		Why: "dpserve picks the devices, and the engine sees no others", InFile: "write resources.gpus",
		OnServe: "dpserve gives each rank its devices: write --gpus with those of this machine",
	}
	overHTTP = Owned{
		Why: "dpserve asks engines over HTTP and TCP", InFile: leaveOut, OnServe: plainHTTP,
	}
	withoutTLS = Owned{
		Why:     "dpserve asks engines over HTTP without TLS",
		InFile:  "leave it out; TLS for clients is set on the node (--tls-cert)",
		OnServe: plainHTTP,
	}
	alwaysOn = Owned{
		Why: "dpserve reads what this flag reports", InFile: "leave it out: it is always set",
		LeftOut: "dpserve always sets it", OnlyOn: true,
	}
)

// ownedFlags are the owned flags of all engines, in kebab case.
//
//nolint:gochecknoglobals // a constant table
var ownedFlags = map[string]Owned{
	"host": {
		InFile: "dpserve binds engines to 127.0.0.1; where clients connect is set on the node (--http-bind)",
		Flag:   "host",
	},
	"port":              {InFile: "dpserve takes ports from the node's --port-range", Flag: "port"},
	"served-model-name": {InFile: "write model.id and model.aliases", Flag: "served-model-name"},
	"model":             ownModel, "model-path": ownModel,
	"lora-modules": ownAdapters, "lora-paths": ownAdapters,
	"shutdown-timeout": {InFile: "write graceful_shutdown_timeout_s", Flag: "shutdown-timeout"},

	"data-parallel-size": ownSize, "dp-size": ownSize, "dp": ownSize,
	"attn-dp-size": ownSize, "attention-data-parallel-size": ownSize,
	"data-parallel-rank":       {InFile: ownRanks, OnServe: anyRank},
	"data-parallel-start-rank": {InFile: ownRanks, OnServe: anyRank},
	"data-parallel-size-local": {InFile: ownRanks, OnServe: oneMachine},
	"data-parallel-multi-port-external-lb": {
		InFile: ownRanks, OnServe: "dpserve starts the ranks itself: leave it out",
	},
	"data-parallel-backend":         {InFile: ownRanks, LeftOut: "each rank is a process of its own"},
	"data-parallel-external-lb":     ownBalancer,
	"data-parallel-hybrid-lb":       ownBalancer,
	"data-parallel-address":         {InFile: ownRanks, LeftOut: "dpserve hands out addresses"},
	"data-parallel-rpc-port":        {InFile: ownRanks, LeftOut: ownPort.LeftOut},
	"data-parallel-supervisor-port": {InFile: ownRanks, LeftOut: "dpserve watches the engines"},
	"load-balance-method": {
		Why: "dpserve picks the rank of a request", InFile: "write routing.policy",
		LeftOut: "dpserve picks the rank of a request; see --policy",
	},

	"nnodes": ownNodes, "node-rank": ownNodes, "headless": ownNodes,
	"dist-init-addr": ownAddress, "master-addr": ownAddress,
	"master-port": {InFile: ownPlaces, LeftOut: ownPort.LeftOut},
	"nccl-port":   ownPort, "nccl-init-addr": ownPort, "grpc-port": ownPort,
	"device-ids": ownDevices, "base-gpu-id": ownDevices, "gpu-id-step": ownDevices,

	"grpc": overHTTP, "grpc-mode": overHTTP, "smg-grpc-mode": overHTTP,
	"uds":         {Why: overHTTP.Why, InFile: leaveOut, OnServe: "write --host and --port"},
	"ssl-keyfile": withoutTLS, "ssl-certfile": withoutTLS, "ssl-ca-certs": withoutTLS,

	"kv-events-config": {
		InFile:  "write engine.kv_events: auto | off",
		LeftOut: "dpserve sets it where the routing policy reads KV events",
	},
	"disaggregation-mode": {
		InFile:  "write prefill: and decode:",
		OnServe: "write --prefill N for the prefill ranks; those of --dp-size decode",
	},
	"disaggregation-bootstrap-port": {InFile: "write prefill: and decode:", LeftOut: ownPort.LeftOut},

	"enable-prompt-tokens-details": {InFile: "it is always set; leave it out", LeftOut: alwaysOn.LeftOut},
	"sim-watch-stdin":              {InFile: "it is always set; leave it out", LeftOut: alwaysOn.LeftOut},
	"enable-metrics":               alwaysOn, "enable-cache-report": alwaysOn,
}

// FindOwned returns what dpserve does about a flag of an engine; false if a user may set it. name is in kebab
// case without leading dashes. NAME.KEY is one key of a flag that takes JSON.
func FindOwned(name string) (Owned, bool) {
	name, _, _ = strings.Cut(name, ".")
	if long, isShort := shortNames[name]; isShort && strings.HasPrefix(long, "data-parallel-") {
		name = long
	}
	owned, is := ownedFlags[name]
	if !is && strings.HasPrefix(name, "data-parallel-") {
		return Owned{InFile: ownRanks, OnServe: anyRank}, true
	}
	return owned, is
}
