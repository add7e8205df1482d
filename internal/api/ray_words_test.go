package api

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// Every status and phase has a word of Ray's, and no word is one that Ray's own clients refuse.
func TestRayWordsAreThoseOfRay(t *testing.T) {
	deployments := []string{"UPDATING", "HEALTHY", "UNHEALTHY", "DEPLOY_FAILED", "UPSCALING", "DOWNSCALING"}
	triggers := []string{
		"CONFIG_UPDATE_STARTED", "CONFIG_UPDATE_COMPLETED", "HEALTH_CHECK_FAILED", "REPLICA_STARTUP_FAILED",
		"DELETING",
	}
	for _, status := range []string{
		client.StatusDeploying, client.StatusRunning, client.StatusUnhealthy, client.StatusDeployFailed,
		client.StatusDeleting,
	} {
		assert.Contains(t, deployments, rayStatuses[status].deployment, status)
		assert.Contains(t, triggers, rayStatuses[status].trigger, status)
	}
	replicas := []string{"", "STARTING", "RECOVERING", "RUNNING", "STOPPING"}
	for _, phase := range []state.Phase{
		state.Pending, state.Starting, state.Ready, state.Fenced, state.Killing, state.Backoff,
		state.Draining, state.Failed, state.Gone, client.Unreachable,
	} {
		word, known := rayReplicaStates[string(phase)]
		assert.True(t, known, phase)
		assert.Contains(t, replicas, word, phase)
	}
	for _, word := range rayProxyStates {
		assert.Contains(t, []string{"STARTING", "HEALTHY", "UNHEALTHY", "DRAINING", "DRAINED"}, word)
	}
}
