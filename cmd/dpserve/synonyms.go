package main

import (
	"errors"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// Hints that several words of other tools share.
const (
	hintStatus = "`dpserve status` lists applications and ranks, `dpserve nodes` the machines"
	hintDelete = "`dpserve delete APP`"
	hintStop   = "`dpserve delete APP` stops an application, `dpserve drain NODE` empties a node; Ctrl-C " +
		"or SIGTERM ends `up`, `serve` and `start`"
	hintScale = "write num_replicas in the file, then `dpserve deploy FILE`; " +
		"`dpserve get APP` prints the file"
	hintRun = "`dpserve serve MODEL` starts the engines of a model, `dpserve up FILE` runs a file, and " +
		"`dpserve up` alone runs simulated engines"
)

// otherCommands are commands of Kubernetes, Docker, Ray Serve, Nomad, Ollama, vLLM and SGLang, with what does
// their work here.
//
//nolint:gochecknoglobals // a constant table
var otherCommands = map[string]string{
	"ps": hintStatus, "ls": hintStatus, "list": hintStatus, "top": hintStatus + "; -w follows them",
	"info":     hintStatus,
	"describe": "`dpserve status APP -o wide`, and `dpserve events APP` for what happened",
	"show":     "`dpserve status APP -o wide`, or `dpserve get APP` for its file",
	"apply":    "`dpserve deploy FILE`", "create": "`dpserve deploy FILE`",
	"edit":  "`dpserve get APP > app.yaml`, then `dpserve deploy app.yaml`",
	"patch": "`dpserve get APP > app.yaml`, then `dpserve deploy app.yaml`",
	"rm":    hintDelete, "remove": hintDelete, "destroy": hintDelete, "undeploy": hintDelete,
	"run": hintRun, "launch": hintRun, "launch_server": hintRun, "launch_router": "`dpserve up --attach URL`",
	"attach": "`dpserve up --attach URL`, or `dpserve ranks add APP URL` beside ranks that run",
	"scale":  hintScale, "autoscale": hintScale,
	"stop": hintStop, "shutdown": hintStop, "kill": hintStop, "down": hintStop,
	"config": "`dpserve get APP` prints the file of an application",
	"undo":   "`dpserve rollback APP`", "rollout": "`dpserve status -w`, or `dpserve rollback APP`",
	"node": "`dpserve nodes`", "cordon": "`dpserve drain NODE`", "uncordon": "`dpserve undrain NODE`",
	"diff": "`dpserve plan FILE`", "lint": "`dpserve validate FILE`", "check": "`dpserve validate FILE`",
	"exec":    "`dpserve ranks call APP PATH` asks the engines",
	"metrics": "the admin API serves them: curl http://" + defaultAddr + "/metrics",
	"ask":     "`dpserve chat TEXT`", "complete": "`dpserve chat TEXT`", "upgrade": "`dpserve restart`",
}

// otherFlags are flags of other tools.
//
//nolint:gochecknoglobals // a constant table
var otherFlags = map[string]string{
	"json": "write -o json", "yaml": "write -o yaml", "format": "write -o json, yaml, wide or name",
	"watch": "write -w where `dpserve help` has it", "follow": "write -f where `dpserve help` has it",
	"replicas": hintScale,
}

// otherResources are words behind `get` that other tools take for a kind.
//
//nolint:gochecknoglobals // a constant table
var otherResources = map[string]string{
	"pods": hintStatus, "pod": hintStatus, "all": hintStatus, "apps": hintStatus, "deployments": hintStatus,
	"services": hintStatus, "nodes": "`dpserve nodes`", "node": "`dpserve nodes`",
	"events": "`dpserve events`", "logs": "`dpserve logs APP`",
}

// hintResource adds a hint to the error of `get` for a word that other tools take for a kind, and that is no
// application.
func hintResource(word string, err error) error {
	answer, ok := errors.AsType[*client.Error](err)
	if !ok || answer.Code != client.CodeNotFound || otherResources[word] == "" {
		return err
	}
	return problem.New(problem.NotFound, "%s", err.Error()).
		WithHint("%s", otherResources[word])
}
