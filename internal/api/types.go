package api

import (
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// The paths of the API.
const (
	pathVersion  = "/api/v1/version"
	pathHealthz  = "/api/v1/healthz"
	pathValidate = "/api/v1/validate"
	pathPlan     = "/api/v1/plan"
	pathApps     = "/api/v1/apps"
	pathEvents   = "/api/v1/events"
	pathMetrics  = "/metrics"
)

// envelope is the first part of every answer.
type envelope struct {
	APIVersion string `json:"apiVersion"`
}

// versionReply answers GET /api/v1/version.
type versionReply struct {
	envelope
	client.BuildInfo
}

// healthReply answers GET /api/v1/healthz: the process answers, which says nothing about applications.
type healthReply struct {
	envelope
	Status string `json:"status"` // "ok"
}

// validateReply answers POST /api/v1/validate for a file without faults.
type validateReply struct {
	envelope
	Warnings []client.Fault `json:"warnings"`
}

// DeployResult is a committed deploy: a client.DeployResult as the Backend returns it.
type DeployResult struct {
	Revision uint64
	Apps     map[string]uint64
	Changes  []client.Change
	Warnings []app.Warning
}

// deployReply answers PUT /api/v1/apps.
type deployReply struct {
	envelope
	client.DeployResult
}

// planReply answers POST /api/v1/plan.
type planReply struct {
	envelope
	Plan     client.Plan    `json:"plan"`
	Warnings []client.Fault `json:"warnings,omitempty"`
}

// appsReply answers GET /api/v1/apps.
type appsReply struct {
	envelope
	Apps []client.AppStatus `json:"apps"`
}

// appReply answers GET /api/v1/apps/{app}.
type appReply struct {
	envelope
	App client.AppStatus `json:"app"`
}

// deleteReply answers DELETE /api/v1/apps/{app}.
type deleteReply struct {
	envelope
	App    string `json:"app"`
	Status string `json:"status"` // "DELETING"
}
