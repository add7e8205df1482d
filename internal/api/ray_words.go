package api

import (
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// rayWords are the words of Ray Serve for one status of an application: of the deployment, and what brought
// the deployment there. The word of the application is dpserve's own.
type rayWords struct{ deployment, trigger string }

// rayStatuses has Ray's words of every status of an application or pool. Ray's NOT_STARTED never appears: an
// application that is stored is DEPLOYING.
var rayStatuses = map[string]rayWords{
	client.StatusDeploying:    {"UPDATING", "CONFIG_UPDATE_STARTED"},
	client.StatusRunning:      {"HEALTHY", "CONFIG_UPDATE_COMPLETED"},
	client.StatusUnhealthy:    {"UNHEALTHY", "HEALTH_CHECK_FAILED"},
	client.StatusDeployFailed: {"DEPLOY_FAILED", "REPLICA_STARTUP_FAILED"},
	client.StatusDeleting:     {"UPDATING", "DELETING"},
}

// rayReplicaStates has Ray's word of each phase of a rank. A phase without a word is of a rank without a
// process that starts again; Ray lists no replica for it.
var rayReplicaStates = map[string]string{
	string(state.Pending):  "STARTING",
	string(state.Starting): "STARTING",
	string(state.Backoff):  "STARTING",
	string(state.Ready):    "RUNNING",
	string(state.Fenced):   "STOPPING",
	string(state.Killing):  "STOPPING",
	string(state.Draining): "STOPPING",
	string(state.Failed):   "",
	string(state.Gone):     "",
	client.Unreachable:     "RECOVERING",
}

// rayProxyStates has Ray's word of each state of a node, whose ingress is Ray's proxy.
var rayProxyStates = map[string]string{
	"alive":    "HEALTHY",
	"draining": "DRAINING",
	"drained":  "DRAINED",
	"silent":   "UNHEALTHY",
	"lost":     "UNHEALTHY",
	"unknown":  "STARTING",
}
